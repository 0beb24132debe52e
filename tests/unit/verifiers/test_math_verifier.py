"""A table of labelled pairs, (reference, answer): the contract of the `math` verifier, case by case."""

import json
import signal
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kitae.errors import VerifierError
from kitae.verifiers.math import math, same_answer
from kitae.verifiers.math.fallback import math_verify_agrees

# fmt: off
EQUAL = {
    "numbers": [
        ("12", "12"), ("12", "12.0"), ("12", "+12"), ("7", "+7"), ("-7", "−7"), ("0.5", ".5"), ("5", "5."),
        ("5", "05"), ("1/2", "0.5"), ("-1/2", r"-\frac{1}{2}"), (r"\frac{-1}{2}", r"-\frac12"),
        (r"\frac{1}{-2}", "-0.5"), (r"\dfrac{3}{4}", "3/4"), (r"\tfrac34", "0.75"), (r"\frac{6}{8}", "3/4"),
        (r"\frac34", r"\frac{3}4"), ("3/4", "¾"), (r"\frac{1}{3}", "0.333333"), ("1/3", "0.3333333333"),
        ("2/3", "0.666667"), ("2/3", "0.666666"), (r"\pi", "3.14159"), (r"\sqrt{2}", "1.41421356"),
        ("0.3", "0.30000000000000004"), ("20", "19.9999999999"), (r"0.\overline{3}", "1/3"),
        (r"0.1\overline{6}", "1/6"), (r"1.\overline{09}", r"\frac{12}{11}"), ("2^{10}", "1024"), ("2**10", "1024"),
        ("2^10", "1024"), ("5!", "120"), (r"\binom{5}{2}", "10"), (r"\sqrt{50}", r"5\sqrt{2}"),
        ("sqrt(50)", r"5\sqrt2"), ("√50", r"5\sqrt{2}"), (r"\sqrt[3]{8}", "2"),
        (r"\frac{1}{\sqrt{2}}", r"\frac{\sqrt{2}}{2}"), (r"\frac{\sqrt3}{3}", r"\frac{1}{\sqrt{3}}"),
        ("27^{1/3}", "3"), ("(-8)^{1/3}", "-2"), (r"\sqrt[3]{-8}", "-2"), ("e^{0}", "1"), (r"\ln e", "1"),
        (r"\ln(e^2)", "2"), (r"\log_2 8", "3"), (r"\log_{10}{100}", "2"), (r"\log 100", "2"), (r"\lg 1000", "3"),
        (r"\sin 30^\circ", r"\frac12"), (r"\sin\frac{\pi}{6}", "0.5"), (r"\cos(\pi)", "-1"),
        (r"\arctan 1", r"\frac{\pi}{4}"), (r"\tan^{-1}(1)", r"\pi/4"), ("|{-5}|", "5"), (r"\left|-5\right|", "5"),
        (r"\lfloor 3.7 \rfloor", "3"), (r"\lceil 3.2 \rceil", "4"), ("10^{50}", r"10^{49} \cdot 10"),
        ("100!", r"100 \cdot 99!"), ("four", "4"), (r"\text{seven}", "7"), (r"6 \times 7", "42"),
        (r"84 \div 2", "42"), ("6*7", "42"), ("2 + 2", "4"), ("2(3+4)", "14"), ("[3+4]2", "14"), ("x - x + 5", "5"),
        (r"1 - \frac{1}{e}", r"\frac{e-1}{e}"), (r"\frac{2\pi}{4}", "π/2"), ("$5$", "5"), (r"\(5\)", "5"),
        (r"\[5\]", "5"), ("$$5$$", "5"), ("５", "5"), ("{5}", "5"), (r"\left(5\right)", "5"), ("= 5", "5"),
        (r"\displaystyle\frac12", "1/2"), (r"5\,", "5"), ("5.", "5"),
    ],
    "thousands": [
        ("1234", "1,234"), ("1234", r"1,\!234"), ("1234", "1{,}234"), ("1234", r"1\,234"), ("1234567", "1,234,567"),
        ("1234.5", "1,234.5"), ("10000", "10 000"), ("-1234", "-1,234"), ("1000000", "10^6"), ("1, 234", "1, 234"),
        (r"\frac{1}{1234}", r"\dfrac{1}{1,\!234}"), ("3.14", "3{,}14"), (r"\$1,234", "1234"),
        ("100, 200", "200, 100"),
    ],
    "scientific": [
        ("1.5e3", "1500"), ("1500", r"1.5 \times 10^3"), ("1500", r"1.5\cdot 10^{3}"),
        ("0.0015", r"1.5 \times 10^{-3}"), (r"6.02 \times 10^{23}", "6.02e23"), (r"2\times10^5", "200000"),
        ("1E3", "1000"), ("1.5 * 10^3", "1500"),
    ],
    "mixed numbers": [
        (r"1\frac{1}{2}", "1.5"), (r"1\frac12", "3/2"), ("1 1/2", "1.5"), (r"-1\frac{1}{2}", "-1.5"), ("2½", "2.5"),
        (r"1 \frac{3}{4}", r"\frac{7}{4}"), ("-2 3/4", "-11/4"), (r"15\frac{39}{40}", r"\frac{639}{40}"),
        (r"3\dfrac{1}{7}", "22/7"),
    ],
    "percent": [
        ("50%", "50%"), (r"50\%", "50%"), ("50%", "0.5"), ("50%", "50"), ("0.5", "50%"), ("50", r"50\%"),
        ("12.5%", "1/8"), (r"50 \text{ percent}", "50%"), ("50 percent", r"50\%"), (r"33\frac{1}{3}\%", "1/3"),
        ("100%", "1"), ("0.1%", "0.001"),
    ],
    "units and currency": [
        ("5", "5 cm"), ("5 cm", "5"), (r"5\text{ cm}", "5cm"), (r"5 \text{ cm}^2", "5"),
        (r"5\text{ cm}^2", r"5 \mathrm{cm}^2"), (r"5\text{ square feet}", "5"), (r"5\ \text{m/s}", "5"),
        ("5", r"5\,\text{dollars}"), ("5", r"\$5"), ("$5", "5"), (r"\$5.00", "5"), ("$18", r"\$18"), ("5", "€5"),
        ("5", "5€"), ("80", r"80\text{ cents}"), (r"\$0.80", "80 cents"), ("1 hour", "60 minutes"),
        ("1 km", "1000 m"), ("100 cm", "1 m"), ("60", r"60^\circ"), (r"60^{\circ}", "60"), ("60°", "60"),
        ("60°", r"\frac{\pi}{3}"), ("60 degrees", r"60^\circ"), ("18", "18 eggs"), ("18", r"18 \text{ eggs per day}"),
        (r"\pi \text{ cm}", r"\pi"), (r"164 \pi \mbox{ square feet}", r"164\pi"), ("7", "7 miles per hour"),
        ("5", "5 m"), ("3", "3 hours"), ("12", r"12\text{ units}"), ("9 min", "9"), ("25 mph", "25"),
        (r"20^\circ\text{C}", "20"), ("10", "10 minutes"), ("4", "4 $"), ("6", "6 дней"), ("6", "6个"),
        ("1 m^2", r"10000\text{ cm}^2"), ("1 square foot", "144 square inches"), ("1 m³", "1000000 cm^3"),
        (r"1\text{ sq. ft}", "144 in^2"), ("2 gallons", "2 gals"),
    ],
    "algebra": [
        ("x+1", "1+x"), ("x^2+2x+1", "(x+1)^2"), ("2x", "2*x"), ("2x", r"2 \cdot x"), ("xy", "yx"), ("x/2", "0.5x"),
        (r"\frac{x}{2}", r"\frac12 x"), (r"\frac{x^2-1}{x-1}", "x+1"), ("a^2-b^2", "(a-b)(a+b)"), ("x^{-1}", "1/x"),
        (r"\sqrt{x^2}", "|x|"), (r"\sin^2 x", r"1-\cos^2 x"), (r"2\sin x\cos x", r"\sin 2x"),
        ("e^{x+1}", r"e \cdot e^x"), (r"\ln(xy)", r"\ln x + \ln y"), (r"\log x", r"\log_{10} x"),
        (r"\log x", r"\ln x"), (r"\frac{1}{1+s}", "(1+s)^{-1}"), ("x_1 + x_2", "x_2+x_1"),
        (r"\alpha\beta", r"\beta \alpha"), (r"\theta", "θ"), ("n(n+1)/2", r"\frac{n^2+n}{2}"), ("-x", "-1x"),
        ("3(x+2)", "3x+6"), ("15(3x+2)", "45x+30"), (r"\frac{2}{x}+\frac{3}{x}", "5/x"), ("n!", r"n \cdot (n-1)!"),
        (r"\binom{n}{2}", "n(n-1)/2"), (r"\sqrt{x}\sqrt{y}", r"\sqrt{xy}"), ("2^{n+1}", r"2 \cdot 2^n"),
        ("x²+1", "x^2+1"), (r"\frac{\pi r}{h+r}", r"\pi r/(r+h)"), ("(x+1)(x+2)", "x^2+3x+2"),
        ("-23x^3(5x^4-2)", "-115x^7+46x^3"), (r"\mathbf{a}+\mathbf{b}", "a+b"),
        (r"\cos^2\theta - \sin^2\theta", r"\cos 2\theta"),
    ],
    "complex numbers": [
        ("3+4i", "4i+3"), ("i^2", "-1"), ("(1+i)^2", "2i"), (r"\frac{1}{i}", "-i"), ("1 + 2i", "1+2i"),
        (r"e^{i\pi}", "-1"), (r"\sqrt{-4}", "2i"), (r"\frac{1+3i}{2}", "0.5+1.5i"), (r"3+4\mathrm{i}", "3+4i"),
        ("|3+4i|", "5"),
    ],
    "equations": [
        ("5", "x=5"), ("x=5", "5"), ("x = 5", "x=5"), ("5", "x = 2+3 = 5"), ("y=2x+1", "2x+1"), ("2x+1", "y=2x+1"),
        ("y=2x+1", "y-2x-1=0"), ("y=2x+1", "2y=4x+2"), ("x=5", "5=x"), ("f(x)=x^2", "x^2"), ("x^2", "f(x)=x^2"),
        ("AB=12", "12"), (r"\angle ABC = 60^\circ", "60"), ("5", "a+b=5"), ("42", r"6 \cdot 7 = 42"),
        (r"0.56 = 56\%", "0.56"), ("2x - y + 3z + 8 = 0", "-2x+y-3z-8=0"), (r"x \approx 3.14", "3.14"),
        ("1/3", r"\frac13 \approx 0.333"), ("k = 6", "6"), ("P(A)=1/2", "1/2"), ("(x,y)=(1,2)", "(1,2)"),
        ("(1,2)", "(x,y)=(1,2)"), ("x^2+y^2=4", "4=y^2+x^2"),
    ],
    "inequalities": [
        ("x>3", "3<x"), (r"x \le 3", r"x \leq 3"), (r"x\geqslant 3", "x>=3"), ("x ≤ 3", r"x \le 3"),
        ("1<x<3", "3>x>1"), ("x>3", r"(3,\infty)"), (r"(-\infty,3]", r"x\le3"), (r"1\le x<3", "[1,3)"),
        ("[1,3)", r"1\le x<3"), (r"x<1 \text{ or } x>3", r"(-\infty,1)\cup(3,\infty)"), ("x<1 or x>3", "x>3 or x<1"),
        ("x>1 and x<3", "1<x<3"), (r"x \in [0,1]", "[0,1]"), ("[0,1]", r"x \in [0,1]"),
        (r"-80\leq g(x)\leq 82", "[-80,82]"), ("x+y<2", "2>x+y"), ("2x+2y<4", "x+y<2"),
        (r"\{x \mid x>3\}", r"(3,\infty)"), (r"x \neq 2", r"(-\infty,2)\cup(2,\infty)"),
    ],
    "intervals and unions": [
        ("(0,1)", "(0, 1)"), ("[0,1)", r"\left[0,1\right)"), (r"(-\infty,\infty)", r"\mathbb{R}"), ("]0,1[", "(0,1)"),
        ("[0,1[", "[0,1)"), (r"(1,2)\cup(3,4)", r"(3,4)\cup(1,2)"), (r"(1,2]\cup[2,3)", "(1,3)"),
        (r"[\frac12, 1]", "[0.5,1]"), ("(0,1)∪(2,3)", r"(0,1) \cup (2,3)"), (r"(-\infty, 2]", r"(-\infty,2]"),
        (r"(-\infty,0)\cup(0,+\infty)", r"\mathbb{R}\setminus\{0\}"), ("[a+b,b]", "[b+a, b]"),
        (r"[-\tfrac18, \tfrac98]", "[-0.125, 1.125]"), (r"[1,2]\cup\{3\}", r"\{3\}\cup[1,2]"),
        ("(1, oo)", r"(1,\infty)"),
    ],
    "sets, lists and tuples": [
        (r"\{1,2\}", r"\{2,1\}"), ("{1,2,3}", r"\{3,2,1\}"), ("1,2", "2,1"), ("1, 2", r"\{1,2\}"), ("1 and 2", "1,2"),
        ("1 or 2", "2, 1"), (r"1 \text{ and } 2", "1,2"), ("(1,2)", "(1,2)"), ("(1,2,3)", "[1,2,3]"),
        ("(1,2)", "1,2"), (r"\langle 1,2\rangle", "(1,2)"), (r"\left(\frac12, 2\right)", "(0.5,2)"),
        ("x=1, y=2", "(1,2)"), ("(1,2)", "x=1, y=2"), ("x=1, y=2", "y=2, x=1"), ("x=1 or x=2", "1, 2"),
        ("x = 1, 2", "1,2"), (r"\pm 2", "2,-2"), (r"2\pm\sqrt3", r"2+\sqrt3, 2-\sqrt3"), (r"x=\pm 2", "-2, 2"),
        (r"\{\pm 2\}", r"\{-2,2\}"), (r"\frac{1\pm\sqrt5}{2}", r"\frac{1+\sqrt5}{2},\frac{1-\sqrt5}{2}"),
        ("(-4, 27);(2, 15)", "(2,15), (-4,27)"), ("1;2", "1,2"), ("{1,1,2}", "{1,2}"), ("5", r"\{5\}"),
        (r"\{(1,2),(3,4)\}", r"\{(3,4),(1,2)\}"), (r"\emptyset", r"\varnothing"), (r"\{\}", r"\emptyset"),
        (r"(3, \frac{\pi}{2})", r"\left(3,\pi/2\right)"),
        (r"-2, 1 + i \sqrt{3}, 1 - i \sqrt{3}", r"1-i\sqrt3, 1+\sqrt3 i, -2"), ("1,2,3", "{3,2,1}"),
        (r"\frac{639}{40}", r"15\frac{39}{40} or \frac{639}{40}"), ("A, C", r"\text{A and C}"),
    ],
    "matrices": [
        (r"\begin{pmatrix}1\\2\end{pmatrix}", "\\begin{pmatrix}\n1 \\\\\n2\n\\end{pmatrix}"),
        (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{bmatrix} 1 & 2 \\ 3 & 4 \\ \end{bmatrix}"),
        (r"\begin{pmatrix}1/2\\2\end{pmatrix}", r"\begin{pmatrix}0.5\\2\end{pmatrix}"),
        (r"\begin{pmatrix}1\\2\end{pmatrix}", "(1,2)"), (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", "[[1,2],[3,4]]"),
        (r"\begin{pmatrix}2\\4\end{pmatrix}", r"2\begin{pmatrix}1\\2\end{pmatrix}"),
        (r"\left(\begin{array}{cc}1&2\\3&4\end{array}\right)", r"\begin{pmatrix}1&2\\3&4\end{pmatrix}"),
        (r"\begin{pmatrix}x^2-1\\1\end{pmatrix}", r"\begin{pmatrix}(x-1)(x+1)\\1\end{pmatrix}"),
        (r"\begin{bmatrix} 1 \\[2pt] 2 \end{bmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}"),
        (r"\mathbf{v} = \begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}"),
        (r"\begin{pmatrix}1 & 2\end{pmatrix}", "(1,2)"),
    ],
    "choices": [
        ("A", "(A)"), ("(A)", "A"), ("A", r"\text{A}"), (r"\text{(A)}", "A"), ("A", "A."), ("A", "A)"),
        ("B", "(B) 12 cm"), ("C", "C: 5"), ("D", "Option D"), ("A", "(a)"), (r"\textbf{(E)}", "E"),
        ("A", r"\mathrm{A}"), ("(C)", r"\textbf{(C)}\ 12"), ("B", "[B]"),
    ],
    "text": [
        (r"\text{yes}", "Yes"), ("Monday", r"\text{Monday}"), ("no solution", "No solutions"),
        (r"\text{even}", "even"), ("October 30", r"\text{October 30}"), (r"\text{Evelyn}", "evelyn"),
        ("the cat", "cat"), (r"8\!:\!34 \text{ p.m.}", "8:34 p.m."), ("LQSX", r"\text{LQSX}"), ("是", r"\text{是}"),
        ("infinity", r"\infty"), ("DNE", "does not exist"), (r"\text{No solution}", r"\emptyset"),
        (r"\text{all real numbers}", r"\mathbb{R}"), (r"+\infty", r"\infty"), ("Нет", "нет"),
    ],
    "bases and ratios": [
        ("1010_2", "1010_{2}"), ("1010_2", "1010"), ("-37_8", "-37_{8}"), ("5:6", "5 : 6"), ("5:6", r"\frac56"),
        ("1:2:3", "1:2:3"),
    ],
    "for math-verify": [
        (r"\int_0^1 x\,dx", "1/2"), (r"\sum_{k=1}^{3} k", "6"), (r"\lim_{x\to 0} \frac{\sin x}{x}", "1"),
    ],
    "as models write": [
        (r"\frac{3}{2}", r"x=\frac{3}{2}"), ("10", r"\boxed{10}"), ("6", "6.00"), ("25", "25.0 square units"),
        (r"\frac{\pi}{6}", r"\dfrac{\pi}{6} \text{ radians}"), ("2", r"x = 2 \text{ only}"), ("(2,3)", r"x=2,\ y=3"),
        ("(2,3)", r"x=2 \text{ and } y=3"), ("-3, 4", r"x = -3 \text{ or } x = 4"), (r"\{-3,4\}", r"x \in \{-3, 4\}"),
        ("y = -2x+3", "-2x+3"), (r"y=\frac{1}{2}x+3", "x-2y+6=0"), (r"2\sqrt{3}", "3.464101615"), ("1.5", "3/2"),
        (r"\frac{a}{b}", "a/b"), (r"9\sqrt{3} - 3\pi", r"3(3\sqrt{3}-\pi)"), ("June 20", r"\text{June 20}"),
        ("3:2", "3/2"), ("2:30 pm", "2:30 PM"), ("0.25", "25%"), ("25", r"25\%"), (r"\$32,\!348", "32348"),
        ("32348", r"\$32,348.00"), ("18", r"\$18 per day"), ("18", "18 dollars a day"), ("x^2-2x+1", "p(x)=x^2-2x+1"),
        (r"f^{-1}(x)=\frac{x-1}{2}", r"\frac{x-1}{2}"),
        (r"f^{-1}(x)=\frac{x-1}{2}", r"f^{-1}(x)=\frac{x}{2}-\frac12"), (r"\frac{1}{2}\ln 3", r"\ln\sqrt3"),
        ("e^{-1}", "1/e"), (r"\ln 2", "0.693147"), ("n^2", "n*n"), ("2n+1", "2*n+1"), ("C", r"\text{C) } 5"),
        ("C", "C. The answer"), (r"4\pi r^2", r"4 \pi r^{2}"), (r"\sqrt{a^2+b^2}", "(a^2+b^2)^{1/2}"),
        (r"\frac{n(n+1)(2n+1)}{6}", r"\frac{1}{6}n(n+1)(2n+1)"), ("3^{100}", "9^{50}"), ("2^{1000}", "4^{500}"),
        (r"\frac{1}{2^{2024}}", "2^{-2024}"), ("2^{100000}", "4^{50000}"),
        (r"(-\infty, -1) \cup (1, \infty)", "|x|>1"), ("x<-1 or x>1", r"x \in (-\infty,-1)\cup(1,\infty)"),
        (r"(1,\infty)", "x>1"), ("(1, 3)", "1 < x < 3"), (r"\left(-\infty,\frac{1}{2}\right]", r"x\leq 0.5"),
        (r"[2,\infty)", r"x \geq 2"), (r"a \le 3", r"(-\infty, 3]"), (r"\cot x", r"\frac{\cos x}{\sin x}"),
        (r"\tan x", r"\sin x/\cos x"), (r"\csc^2 x", r"1+\cot^2 x"), (r"-\frac{3}{4}i", r"\frac{-3i}{4}"),
        ("0", r"0^\circ"), ("120", r"120^{\circ}"), ("2,3,5", "2, 3, and 5"), ("2,3,5", r"2, 3, \text{ and } 5"),
        ("4", "four"), ("7", r"7\text{th}"), ("1", r"1 \text{ (mod } 7)"), ("3", r"3 \pmod{7}"),
        ("3", r"x \equiv 3 \pmod 7"), ("2^{n}-1", "2^n - 1"), (r"\sqrt[4]{2}", "2^{1/4}"),
        (r"\sqrt[4]{2}", "2^{0.25}"), (r"10\text{ m}", "10 meters"), (r"10\text{ m/s}", "10 m/s"), ("6+9i", "6 + 9i"),
        ("0.1", "1/10"), ("1/10", "10%"), ("-1", "−1"), ("1/2", ".5"), ("100", "1e2"), (r"24\text{ cm}^2", "24 cm^2"),
        ("24 cm^2", "24 square centimeters"), ("x^2+y^2=1", "x^2 + y^2 = 1"),
        ("(x-1)^2+(y+2)^2=9", "x^2-2x+y^2+4y-4=0"), ("True", "true"), ("7", "7 (since 3+4=7)"),
        (r"k\pi, k\in\mathbb{Z}", r"k\pi"), (r"x=\frac{\pi}{4}+k\pi", r"x = \frac{\pi}{4} + \pi k"),
        ("C e^{2x}", "y=Ce^{2x}"), (r"\frac{x^3}{3}+C", r"\frac13 x^3 + C"), (r"\{1,2,3\}", r"\{1, 2, 3, \}"),
        (r"1 < x \le 2", "(1,2]"), (r"1.2 \times 10^{-5}", "0.000012"), ("11", "11_{10}"), ("(6,31,-1)", "6, 31, -1"),
        ("50", "50.0%"), ("0.05", r"5\%"), (r"\frac{13}{4}", r"3\frac{1}{4}"), (r"\frac{13}{4}", "3 1/4"),
        (r"\frac{13}{4}", "3.25"), ("x=-1", "x = - 1"), (r"\tfrac{1}{2}(1+\sqrt5)", r"\frac{1+\sqrt5}2"),
        (r"2\sqrt{2}+2", "2(1+√2)"), (r"\max(2,3)", "3"), (r"\gcd(12,18)", "6"), (r"\sec 60^\circ", "2"),
        (r"\arcsin\frac12", r"\frac\pi6"), (r"\frac{\pi}{6}", r"30^\circ"), ("i", r"\sqrt{-1}"), ("|x-2|", "|2-x|"),
        (r"\infty", "infinity"), (r"-\infty", "-∞"), ("16:9", "16/9"), ("12,000", "12000"), ("3.0", "3"),
        ("1.10", "1.1"), ("(0.5, 1)", r"\left(\frac{1}{2},1\right)"),
    ],
    "chains": [
        ("1/3", r"\frac13 \approx 0.333"), ("0.58", r"\frac{7}{12} \approx 0.58"),
        (r"58.3\%", r"\frac{7}{12} \approx 58.3\%"),
        (r"\frac{\sqrt{3}}{3} \approx 0.577", r"\frac{\sqrt{3}}{3}"), (r"\sqrt{2} \approx 1.41", "1.41"),
        ("1/3", r"x = \frac13 \approx 0.3"), ("1230000", r"1234567 \approx 1230000"), ("3", r"\sim 3"),
        ("30", r"\frac{1}{2} \text{ hour} = 30 \text{ minutes}"), ("-50", r"(1-2) + \dots + (99-100) = 50(-1) = -50"),
        ("x=3", r"2x = 6 \Rightarrow x = 3"), ("3", r"4 \cdot 6 \equiv 24 \equiv 3 \pmod{7}"), ("f(2)=5", "5"),
        ("P(X>2)=0.3", "0.3"), (r"P(A \cap B)=\frac12", "0.5"), (r"\frac12", r"A_{\min} = \frac12"),
        ("2^{n-1}-n", r"k_{\max}(n) = 2^{n-1}-n"), (r"\frac{dy}{dx}=2x", "2x"), ("60", "0.6 or 60%"),
        ("2516_8", "10101001110_2 = 2516_8"), (r"2\sqrt3", r"2\sqrt3 = 3.46"), ("3.46", r"2\sqrt3 = 3.46"),
        ("5", r"2 \text{ apples} + 3 \text{ pears} = 5 \text{ fruits}"), ("150", r"15\% \text{ of } 1000 = 150"),
    ],
    "both have units": [
        (r"5 \text{ mph}", "5 miles per hour"), (r"36 \text{ km/h}", r"10 \text{ m/s}"), ("£5", "5 pounds"),
        (r"3000 \text{ J}", r"3 \text{ kJ}"), ("2 years", "24 months"), ("5 feet", "5 feet tall"),
        ("10 apples", r"10 \text{ Apples}"), ("1 apple", "1 apples"), ("60 cm^2", "60 square units"),
        (r"\$18", "18 dollars per day"), (r"20^\circ C", "20°C"), (r"20^\circ", "20°C"), ("3:05 pm", "3:05 PM"),
        ("4:30 p.m.", "4:30"), (r"3 \times 10^8", "3*10^8 m/s"), (r"\text{100 square units}", "100"), ("5 m/s", "5"),
    ],
    "magnitudes": [
        ("5000000", "5 million"), (r"\$1.5 \text{ million}", "1500000"), ("36", "3 dozen"), ("24 eggs", "2 dozen eggs"),
        ("3000", r"3 \text{ thousand dollars}"), ("5", "5 times"), ("5", "5 more"), ("3", "3 quarters"),
    ],
    "numbers in parts": [
        ("40 inches", "3 feet 4 inches"), (r"2 \text{ hours } 30 \text{ minutes}", "150 min"),
        (r"3 \text{ hours and } 20 \text{ minutes}", "200 minutes"), (r"45^\circ 30'", r"45.5^\circ"),
        ("3 ft + 4 in", "40 in"),
    ],
    "letters and units": [
        (r"\frac{1}{2} g t^2", r"\frac{gt^2}{2}"), (r"\frac{1}{3} s", r"\frac{s}{3}"), ("3 s + 2", "2+3s"),
        (r"\frac{3}{2} L", r"\frac{3L}{2}"), ("2 m", "2m"), ("5 m", "5"), ("5 m", "500 cm"),
        (r"\frac{h(a+b)}{2}", r"\frac{(a+b)h}{2}"),
    ],
    "small and large": [
        ("0", r"\sin\pi"), ("0", r"e^{i\pi}+1"), ("0", r"\sqrt2+\sqrt3-\sqrt{5+2\sqrt6}"),
        (r"\frac{e^{-100}}{2}", r"\frac{1}{2e^{100}}"), (r"\frac{1}{2004!}", r"\frac{2005 \cdot 2006}{2006!}"),
        ("8!!", "384"), ("604800", "5!7!"),
    ],
    "words for numbers": [
        ("25", "twenty-five"), ("100", "one hundred"), ("105", r"\text{one hundred and five}"), ("1/2", "one-half"),
        ("2/3", "two-thirds"), ("1234", "one thousand two hundred thirty-four"),
        ("2500000", "two million five hundred thousand"),
    ],
    "numerals": [
        ("42", "٤٢"), ("42", "४२"), (r"\frac16", "⅙"), ("1/3", "0.333..."), ("1/3", "0.(3)"), ("1/3", r"0.\dot{3}"),
        ("1/3", r"0.\bar{3}"), ("1/7", r"0.\dot{1}4285\dot{7}"), ("1/6", "0.1(6)"), ("1234567", "1.234.567"),
        ("1234.56", "1.234,56"), ("1000000", "10,00,000"), ("3.5", "3,5"), ("32349", r"32,\! 349"), ("255", "0xFF"),
        ("5", r"5^{\text{th}}"), ("5", "5^{th}"), (r"\text{5th}", "5"), ("40/900", "4 4/9%"), (r"28\%", "28 pct"),
        ("10/9", r"\frac{10}{9}\\"[:-1]),
    ],
    "notation": [
        (r"p \le 0", r"p \leqq 0"), (r"1 \leqq x \leqq 2", "[1,2]"), ("2^n", r"2^n \text{ for all } n"),
        ("(1, k)", r"(1,k)\ \forall k\in\mathbb{Z}^+"),
        ("f(x)=ax+b", r"f(x) = ax+b \text{ where } a, b \in \mathbb{R}"),
        ("5", r"\color{red}{5}"), ("5", r"\textcolor{blue}{5}"), ("5", r"\underline{5}"), ("5", r"\huge{5}"),
        ("7", r"\mathbf{x=7}"), (r"\sinh^{-1}(a)", r"\operatorname{arsinh}(a)"), (r"2\bar{x}", r"2\overline{x}"),
        (r"\varphi", r"\phi"), (r"\epsilon", r"\varepsilon"), (r"\{x : x>2\}", r"(2,\infty)"), ("1/2", r"{1\over 2}"),
        ("x=2, x=3", "x=3 또는 x=2"), ("x=2 或 x=3", "x=3, x=2"), (r"[0,\infty]", r"[0,\infty)"),
        (r"A \cup B", r"B \cup A"),
        (r"k\pi, k\in\mathbb{Z}", r"n\pi, n\in\mathbb{Z}"), (r"3\operatorname{cis}60^\circ", r"3e^{i\pi/3}"),
        (r"\left\{\begin{array}{l}x=1\\y=2\end{array}\right.", "(1,2)"),
        ("x=1, y=2", r"\left\{\begin{aligned}x&=1\\y&=2\end{aligned}\right."),
        (r"\begin{cases} x=1 \\ y=2 \end{cases}", "x=1, y=2"), (r"\begin{cases} x=1 \\ y=2 \end{cases}", "(1,2)"),
        (r"\begin{cases} x & x>0 \\ -x & x \le 0 \end{cases}",
         r"\begin{cases} -x & \text{if } x \le 0 \\ x & \text{if } x>0 \end{cases}"),
        (r"\begin{cases} x & x>0 \\ -x & x \le 0 \end{cases}",
         r"\left\{\begin{array}{ll} x & x>0 \\ -x & x \le 0 \end{array}\right."),
        (r"\begin{vmatrix}1&2\\3&4\end{vmatrix}", "-2"),
        (r"\begin{pmatrix}6&8\\10&12\end{pmatrix}",
         r"\begin{pmatrix}1&2\\3&4\end{pmatrix}+\begin{pmatrix}5&6\\7&8\end{pmatrix}"),
        (r"\begin{pmatrix}3\\-2\end{pmatrix}",
         r"\begin{pmatrix}1&0\\0&1\end{pmatrix}\begin{pmatrix}3\\-2\end{pmatrix}"),
        ("0 \\\\text{ or } 5", r"0 \text{ or } 5"),
    ],
    "names and order": [
        ("(2,3)", "y=3, x=2"), ("(2,3)", "r=2, h=3"), ("(x,y)=(2,3)", "y=3, x=2"), ("x>2 and x<5", "(2,5)"),
        (r"x=1 \text{ and } x=2", "x=1 or x=2"), ("1:2:3", "2:4:6"), ("2:5", "12:30"), ("3:7", "6:14"),
        (r"2:\sqrt{2}", r"\sqrt{2}:1"), ("5:12", "5/12"),
        (r"3 \pmod 7", r"10 \pmod 7"), ("f(x+1)", "f(1+x)"), ("2f(x)", "f(x)+f(x)"),
    ],
    "sums and integrals": [
        (r"\sum_{k=1}^{n} k", r"\frac{n(n+1)}{2}"), (r"\sum_{k=1}^{n} k^2", r"\frac{n(n+1)(2n+1)}{6}"),
        (r"\sum_{k=0}^{n} \binom{n}{k}", "2^n"), (r"\prod_{k=1}^{4} k", "24"), (r"\int_0^1 x^2 dx", r"\frac13"),
        (r"\int_0^\infty e^{-x^2} dx", r"\frac{\sqrt\pi}{2}"), (r"\lim_{x\to\infty} \frac1x", "0"),
        (r"\frac{d}{dx} x^2", "2x"),
    ],
    "decimal commas": [
        ("0.125", "0,125"), ("0.05", "0,05"), ("1125", "1,125"), ("0.125 kg", r"0{,}125 \text{ kg}"),
        ("-0.125", "-0,125"), ("0.25 kg", "0,25 kg"), ("10^{-3}", "0,001"), ("1/8", "0,125"),
    ],
    "a quantity and its value": [
        (r"\frac{AB}{CD}=2", "2"), ("A:B=1", "1"), ("a:b=2:3", "2:3"), ("a:b=2:3", r"\frac23"), ("a:b=2:3", "4:6"),
        (r"\sin A=\frac12", r"\frac12"), (r"\cos\theta = 0.6", "3/5"), ("a+b=7", "7"), (r"\log_2 N = 10", "10"),
        (r"\frac{S_1}{S_2} = \frac{4}{9}", "4:9"), (r"\tan(A+B)=1", "1"), (r"\sin 2A = \frac12", "0.5"),
        (r"\frac{AB}{CD}=2", r"\frac{AB}{CD}=2"),
    ],
    "values of names, time and again": [
        ("(5,2),(7,2)", "p=5,q=2;p=7,q=2"), ("p=5,q=2;p=7,q=2", "(7,2),(5,2)"), ("p=5,q=2;p=7,q=3", "p=7,q=3;p=5,q=2"),
        ("(1,2),(2,1)", r"x=1, y=2 \text{ or } x=2, y=1"), (r"\{(1,2),(2,1)\}", r"y=2, x=1 \text{ or } x=2, y=1"),
    ],
    "limits, remainders, coefficients": [
        (r"\lim_{x\to 0}\frac{\sin x}{x}=1", "1"), ("1", r"\lim_{x\to 0}\frac{\sin x}{x}=1"),
        (r"\lim_{n\rightarrow\infty} a_n = 4", "4"), (r"17 \bmod 5 = 2", "2"), ("2", r"17 \bmod 5 = 2"),
        ("2", r"17 \bmod 5"), ("2", r"17 \mod 5"), ("2", "17 mod 5 = 2"), ("3", r"2^{10} \bmod 7 + 1"),
        ("3", r"3 \mod 7"), ("4", r"-1 \bmod 5"),
        (r"x \equiv 3 \mod 7", r"x \equiv 3 \pmod 7"), (r"{16 \choose 2}", "120"), ("120", r"{16 \choose 2}"),
        (r"{n \choose 2}", r"\frac{n(n-1)}{2}"), (r"\frac{1}{2}{4 \choose 2}", "3"), ("10", r"5 \choose 2"),
    ],
    "indices and powers": [
        ("a^2_n", "a_n^2"), ("a^{2}_{n}", "a_n^2"), ("x^2_1 + x^2_2", "x_1^2+x_2^2"), (r"\log^2_3 9", "4"),
    ],
    "unions that overlap": [
        (r"(0,2)\cup(1,3)", "(0,3)"), ("(0,3)", r"(0,2)\cup(1,3)"), ("[0,3]", r"[0,2]\cup[1,3]"),
        ("(0,3)", r"(0,5)\cap(-1,3)"),
        ("x>1", r"(1,4)\cup(3,\infty)"),
    ],
    "wide spaces": [
        (r"x=1\quad y=2", "x=1, y=2"), (r"x=1,\quad y=2", "(1,2)"), (r"1\quad 2", "1, 2"), (r"5\quad", "5"),
        (r"x=1,\quady=2", "x=1, y=2"), (r"5\quad\text{cm}", "5 cm"), (r"x=1\qquadx=-2", "1, -2"), (r"\quad 7", "7"),
    ],
    "the same function": [
        (r"\ln|x|+C", r"C+\ln|x|"), (r"\ln|x|", r"\frac12\ln x^2"), ("|x|", r"\max(x,-x)"), ("x", r"\ln e^x"),
        ("x", r"\tan(\arctan x)"), (r"\ln\frac ab", r"\ln a-\ln b"), (r"\sqrt{\frac ab}", r"\frac{\sqrt a}{\sqrt b}"),
        ("x^{3/2}", r"x\sqrt x"), (r"\lfloor x\rfloor", r"-\lceil -x\rceil"),
        (r"\lfloor x+1\rfloor", r"1+\lfloor x\rfloor"),
        (r"\sqrt{x^2+10^8}-x", r"\frac{10^8}{\sqrt{x^2+10^8}+x}"), (r"\min(x,\infty)", "x"),
        (r"\min(x,y)", r"\frac{x+y-|x-y|}{2}"), (r"\arcsin x", r"\frac{\pi}{2}-\arccos x"),
        (r"\sqrt{n}\sqrt{n+1}", r"\sqrt{n^2+n}"),
        (r"\ln\frac{T_1-T_0}{T_2-T_0}", r"\ln(T_1-T_0)-\ln(T_2-T_0)"), (r"\min(x^2,10^6)", r"\min(10^6,|x|^2)"),
    ],
}

UNEQUAL = {
    "decimal commas": [
        ("1", "0,001"), ("0,2", "0,3"), ("125", "0,125"), ("-125", "-0,125"), ("125 kg", r"0,125 \text{ kg}"),
        ("5", "0,5"), ("0.125", "1,125"),
    ],
    "a quantity and its value": [
        (r"\frac{AB}{CD}=2", r"\frac12"), ("a:b=2:3", "3:2"), (r"\sin A=\frac12", "0.6"), ("2x+1=7", "7"),
        ("x^2=9", "9"),
        ("x^2+y^2=25", "25"), ("x+y=5", "5"), ("2x=6", "6"), ("a+b=7", "8"), ("a+b=c", "c"), ("|x-2|=3", "3"),
        (r"\log_2(x+1)=3", "3"),
        (r"\frac{x}{2}=3", "3"), (r"\sqrt{x}=3", "3"),
    ],
    "values of names, time and again": [
        ("(5,2),(7,2)", "p=2,q=5;p=7,q=2"), ("p=5,q=2;p=7,q=3", "p=5,q=3;p=7,q=2"), ("(5,2),(7,2)", "p=5,q=2"),
        ("(5,2),(7,2)", "p=5,q=2,p=7"),
    ],
    "limits, remainders, coefficients": [
        (r"\lim_{x\to 0}\frac{\sin x}{x}=1", "0"), ("2", r"17 \bmod 6 = 2"), ("17", r"17 \bmod 5"), ("17", "17 mod 5"),
        ("120", r"{16 \choose 3}"), ("9", r"8 \to 9"), (r"x \equiv 3 \mod 7", r"x \equiv 3 \mod 5"),
    ],
    "indices and powers": [("a^2_n", "a_2^n"), ("a^2_n", "a^2"), ("a^2_n", "a_n")],
    "unions that overlap": [("(0,3)", r"(0,2)\cup(2,3)"), ("(0,3)", r"(0,2)\cup(1,4)"), ("(0,3)", r"(0,2)\cap(1,3)")],
    "wide spaces": [(r"1\quad 2", "12"), ("12", r"1\quad 2"), (r"x=1\quad y=2", "x=2, y=1"), ("5", r"5\quad 6")],
    "another function": [
        (r"\ln|x|+C", r"\ln(-x)+C"), (r"\ln|x|+C", r"\ln x+C"), (r"\ln x", r"\ln|x|"), ("|x|", r"\sqrt{x}^2"),
        ("x", r"\sqrt{x}^2"),
        ("x^2", r"\min(x^2,10^6)"), (r"\min(x^2,10^6)", "x^2"), ("x^3", r"\min(x^3,10^{12})"),
        (r"\sqrt{x}", r"\min(\sqrt x,10^6)"),
        ("x^2", r"\max(x^2,0.000001)"), ("x", r"e^{\ln x}"), (r"e^{\ln x}", "x"), ("x", r"\arcsin(\sin x)"),
        ("x", r"\sin(\arcsin x)"),
        ("|x|", r"\arccos(\cos x)"), ("x", r"\arctan(\tan x)"), ("x", r"\lfloor x\rfloor"),
        (r"\lceil x\rceil", r"\lfloor x\rfloor+1"),
        (r"2\ln x", r"\ln x^2"), ("x", r"10^{\lg x}"), ("x+y", r"\sqrt{x}^2+y"), (r"\ln|x|+\ln|y|", r"\ln x+\ln y"),
        ("x", r"\max(x,-10^7)"), ("1", r"\frac{\sqrt x}{\sqrt x}"), ("x", r"\operatorname{sgn}(x)x"),
    ],
    "as models write": [
        (r"2\sqrt{3}", "3.46"), ("a/b", "b/a"), ("2^{1000}", "2^{1000}+1"),
        (r"\begin{bmatrix}1&0\\0&1\end{bmatrix}", "I"), ("x^3+3x-6", "x^3 + 3x - 6 = 0"),
        (r"\text{Yes}", "yes, because"), ("True", "False"), ("even function", "even"),
        (r"\overrightarrow{AB}", r"\overrightarrow{BA}"), (r"\vec{a}", r"\vec{b}"),
        (r"\frac{\pi}{4}+k\pi", r"\frac{\pi}{4}+n\pi"), ("12000", "12k"),
    ],
    "numbers": [
        ("12", "13"), ("12", "-12"), ("1/3", "0.333"), ("1/3", "0.33333"), (r"\pi", "3.14"), ("0.123456", "0.123457"),
        ("1000000", "1000001"), ("0.0000001", "0.0000002"), ("1/2", "2"), (r"\sqrt{2}", "2"), ("5", "5!"),
        (r"5\sqrt2", "5"), ("10^{50}", "10^{50}+1"), ("100!", "100!+1"), (r"1-\frac1e", r"1+\frac1e"),
        ("1-1/e", "1+1/e"), (r"\sqrt{3}", r"-\sqrt{3}"), ("2^{10}", "2^{11}"), ("0.5", "50"), ("1", r"\frac{1}{0}"),
        ("0", "0.000001"), ("1/7", "0.142"), ("19.999", "20"), ("3", "3i"), ("e", "2.718"), (r"\frac12", r"\frac13"),
        ("5", ""), ("5", "x"), ("0", r"\frac{0}{0}"), ("e^2", "2e"), (r"\ln 2", r"\ln 3"),
        (r"\sin 1", r"\sin 1^\circ"), ("3", r"\lfloor 2.9 \rfloor"), ("123456", "123456.4"), ("1", "1,1"),
    ],
    "thousands": [
        ("1234", "1, 234"), ("1,2", "12"), ("1234", "1,2,3,4"), ("1234", "1,23,4"), ("12345", "1,234"),
        ("1.234", "1,234"),
    ],
    "scientific": [
        ("1500", r"1.5 \times 10^4"), ("1e3", "1e4"), ("0.0015", r"1.5 \times 10^3"),
    ],
    "mixed numbers": [
        (r"1\frac{1}{2}", "1/2"), ("1 1/2", "11/2"), (r"-1\frac12", "-1/2"),
    ],
    "percent": [
        (r"10^\circ", r"10\%"), (r"10\%", "10°"), ("0.5", "50"), ("50", "0.5"), ("50%", "5%"), ("50%", "500"),
        ("5%", "0.5"),
    ],
    "units and currency": [
        ("5 cm", "5 m"), ("5 cm", "6 cm"), (r"\$5", "€5"), ("1 hour", "1 minute"), ("60°", "61°"), ("18", "19 eggs"),
        ("5 kg", "5 cm"), (r"\$0.80", "80 dollars"), ("60", r"\frac{\pi}{3}"),
        ("1 m^2", "100 cm^2"), ("1 square meter", "100 square centimeters"), ("5 square feet", "60 inches"),
        ("3 gals", "3 liters"), ("1 m^2", "1 cm^2"),
    ],
    "algebra": [
        ("x+1", "x+2"), ("x", "y"), ("x^2", "2x"), ("|x|", "x"), (r"\sqrt{x^2}", "x"), ("x", "5"), ("2x", "x^2"),
        ("a-b", "b-a"), (r"\sin x", r"\cos x"), ("x_1", "x_2"), ("(x+1)^2", "x^2+1"), ("x^2+2x+1", "x^2+2x"),
        ("1/(x+1)", "1/x+1"), ("-2^2", "(-2)^2"), (r"\frac{1}{2x}", r"\frac12 x"), ("x+1", "X+1"), ("ab", "a+b"),
        ("e^{2x}", "2e^x"),
    ],
    "complex numbers": [
        ("3+4i", "3-4i"), ("3+4i", "4+3i"), ("2i", "2"), ("i", "1"), ("-i", "i"),
    ],
    "equations": [
        ("x=5", "y=5"), ("x=5", "6"), ("5", "x=6"), ("y=2x+1", "y=2x+2"), ("2x+1=7", "7"), ("y=2x", "2x-y=1"),
        ("x+y=2", "x-y=2"), ("5", "x=5=6"),
    ],
    "inequalities": [
        ("x>3", "x<3"), ("x>3", r"x\ge3"), ("x>3", r"[3,\infty)"), ("1<x<3", r"1\le x<3"), ("x<1 or x>3", "1<x<3"),
        ("x>3", "y>3"), ("x+y<2", "x+y>2"), ("x>3", "3"), ("x>3", "x=3"),
    ],
    "intervals and unions": [
        ("[0,1]", "[0,1)"), ("(0,1)", "[0,1]"), ("(0,1]", "[0,1)"), ("(0,1)", "(0,2)"), (r"(0,1)\cup(2,3)", "(0,1)"),
        (r"(0,1)\cup(1,2)", "(0,2)"), (r"(-\infty,1)", r"(1,\infty)"), (r"(0,1)\cup(2,3)", r"(0,1)\cap(2,3)"),
        (r"\mathbb{R}", r"(0,\infty)"),
    ],
    "sets, lists and tuples": [
        ("(1,2)", "(2,1)"), ("(1,2)", "(1,3)"), ("(1,2)", "(1,2,3)"), (r"\{1,2\}", r"\{1,3\}"),
        (r"\{1,2\}", r"\{1\}"), ("1,2", "1"), ("1", "1,2"), ("1,2,3", "1,2"), ("(1,2)", r"\{1,2\}"), ("(1,2)", "2,1"),
        (r"\pm 2", "2"), ("2", r"\pm 2"), (r"2\pm\sqrt3", r"2+\sqrt3"), ("x=1, y=2", "x=2, y=1"),
        ("x=1, y=2", "(2,1)"), ("1,1,2", "1,2"), (r"\emptyset", "0"), (r"\emptyset", r"\{0\}"),
        ("(1,2),(3,4)", "(1,3),(2,4)"), ("5 or 6", "5"), ("5", "5 or 6"),
    ],
    "matrices": [
        (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}2\\1\end{pmatrix}"),
        (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}1&2\end{pmatrix}"),
        (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{pmatrix}1&3\\2&4\end{pmatrix}"),
        (r"\begin{pmatrix}1\\2\end{pmatrix}", "1"), (r"\begin{pmatrix}1\\2\end{pmatrix}", "(2,1)"),
        (r"\begin{pmatrix}2\\4\end{pmatrix}", r"3\begin{pmatrix}1\\2\end{pmatrix}"),
        (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", "(1,2,3,4)"),
    ],
    "choices": [
        ("A", "B"), ("A", "(B)"), ("(A)", "AB"), ("A", "B) A"), ("A", "5"), ("E", "2.718281828"), ("A", "A, B"),
    ],
    "text": [
        (r"\text{yes}", "no"), ("Monday", "Tuesday"), ("even", "odd"), ("October 30", "October 31"),
        ("5", "five apples and six"), (r"\infty", r"-\infty"), ("no solution", "0"), ("8:34 p.m.", "8:34 a.m."),
        ("Evelyn", "5"),
    ],
    "bases and ratios": [
        ("1010_2", "1010_3"), ("1010_2", "1011_2"), ("1010_2", "11"), ("5:6", "6:5"), ("1:2:3", "1:2"),
    ],
    "chains": [
        ("3", r"1\approx2\approx3\approx4\approx5"), ("4", r"3 \approx 4 \approx 5"), ("2", r"1 \approx 2"),
        ("2", r"x \approx 1 \approx 2 \approx 3"), ("3", r"x = 1 \approx 2 \approx 3"), ("10", r"14 \approx 10"),
        ("4", "3 = 4"), ("3", "3 = 4"), ("7 = 11a+c", "11a+c"), ("11a+c", "7 = 11a+c"), ("9", r"8 \to 9"),
        ("9", r"4 \Rightarrow 9"), ("9", r"1 \mapsto 9"), ("5", r"\uparrow 5"), ("f(2)=5", "f(5)=2"), ("2", "log=2"),
    ],
    "both have units": [
        (r"5 \text{ mph}", r"5 \text{ km/h}"), (r"3 \text{ kJ}", r"3 \text{ J}"), ("10 years", "10 days"),
        (r"5 \text{ cm}^2", r"5 \text{ cm}"), (r"3 \text{ m/s}", r"3 \text{ m/s}^2"), ("20°C", "20°F"),
        (r"5 \text{ units north}", r"5 \text{ units south}"), ("3 profit", "3 loss"), ("10 apples", "10 oranges"),
        (r"3 \text{ boys}, 5 \text{ girls}", r"5 \text{ boys}, 3 \text{ girls}"), ("5", r"5 \text{ is wrong}"),
        ("3:05 pm", "3:05 am"), (r"3:05 \text{ p.m.}", r"3:05 \text{ a.m.}"),
        (r"30^\circ \text{N}", r"30^\circ \text{S}"),
        (r"\$3", "3 rupees"), (r"3 \text{ N}", r"3 \text{ J}"), (r"3 \text{ nm}", r"3 \text{ mm}"),
        ("5 kg", "5 apples"),
        (r"x \equiv 3 \pmod 7", r"x \equiv 3 \pmod 5"), (r"3 \pmod 7", r"4 \pmod 7"), ("0.25", r"0.25\%"),
    ],
    "magnitudes": [
        ("5", "5 million"), (r"2 \text{ million}", r"2 \text{ billion}"), ("3", "3 dozen"),
        (r"\$1.5 \text{ million}", "1.5"),
    ],
    "numbers in parts": [
        ("12", "3 feet 4 inches"), ("60", "2 hours 30 minutes"), (r"2 \text{ hours } 30 \text{ minutes}", "60"),
        ("20", "1 hr 20 min"), ("30", "5 apples 6"), ("30", r"5 \text{ or maybe } 6"), ("56", r"7 \text{ to } 8"),
        ("36", r"12 \text{ remainder } 3"), ("15", r"3 \text{ boys, } 5 \text{ girls}"), ("7", "3 ft + 4 in"),
        ("103/9", "11.0 4/9"), ("5", r"5 \text{ or 6}"), ("5", r"5 \text{ maybe 6}"), ("5", "5 squared"),
        ("5", "5 factorial"),
        ("5", "5 halves"), ("5", "5 or six"), ("-330,90", "-330,9"),
    ],
    "letters and units": [
        (r"\frac{2}{3} R^2 h", r"\frac{2}{3} R^2"), (r"\frac{1}{2} m", r"\frac{1}{2}"), ("(x+1) h", "x+1"),
        (r"\frac{1}{2} g t^2", r"\frac12 t^2"), ("3 s + 2", "5"), ("5 m", "5 s"),
    ],
    "small and large": [
        ("e^{-100}", "e^{-200}"), ("e^{-60}", "0"), (r"\pi \cdot 10^{-30}", "10^{-30}"), ("e^{-100}x", "e^{-90}x"),
        (r"\sqrt{2}\cdot 10^{-26}", r"\sqrt{3}\cdot 10^{-26}"), (r"10^{20}\pi + 1", r"10^{20}\pi"),
        ("1234567890123", "1234567890124.0"), ("1234567890123", "1234567890123.9"), ("10000000000", "10000000001.0"),
        ("1234.56", "1234.569"), ("100000.0", "100000.05"), ("2^{60000}", "2^{60000}+1"),
        ("2^{60000}", "2^{60000}+2^{59000}"),
        (r"\sqrt{10^{40}+1}", "10^{20}"), (r"\frac{1}{2004!}", r"\frac{1}{2006!}"), ("1/0", "2/0"), ("0xFF", "0xAB"),
        ("0", "0xFF"),
    ],
    "words": [
        ("15", "twenty-five"), ("23", "two three"), ("tea", "eat"), ("ABC", "CBA"), ("AB", "BA"),
        ("2008", "2024-01-15"),
        ("2024-01-15", "2024-15-01"), (r"p \land q", r"p \lor q"), (r"x=1 \text{ and } y=2", r"x=1 \text{ or } y=2"),
        (r"x>1 \text{ and } x<5", r"x>1 \text{ or } x<5"),
    ],
    "names and order": [
        ("(2,3)", "y=2, x=3"), ("(2,3)", "b=2, a=3"), ("(x,y)=(2,3)", "y=2, x=3"), ("12:30", "2/5"), ("12:30", "2:5"),
        ("f(2x)", "2f(x)"), ("f(x+1)", "f(x)+f"), (r"\max(x,3)", "3"), (r"\max(x,-5)", "x"), (r"\min(x,100)", "x"),
        (r"\frac{dy}{dx}", r"\frac{y}{x}"), (r"\frac{\partial f}{\partial x}", r"\frac{\partial f}{\partial y}"),
        (r"\vec{a}\cdot\vec{b}", r"\vec{a}\times\vec{b}"), (r"2k\pi, k\in\mathbb{Z}", r"n\pi, n\in\mathbb{Z}"),
    ],
    "unread notation": [
        (r"1, 2, \ldots, 10", r"1, 4, \ldots, 10"), (r"1, 2, \ldots, n", r"1, 3, 5, \ldots, 2n-1"),
        (r"\forall x>0, f(x)=0", "f(x)=0"), ("f(x)=0", r"\forall x>0, f(x)=0"),
        (r"\begin{cases} 1 & x>0 \\ 0 & x\le 0\end{cases}", r"\begin{cases} 1 & x>0 \\ 2 & x\le 0\end{cases}"),
        (r"\begin{pmatrix}1&&2\end{pmatrix}", r"\begin{pmatrix}1&2\end{pmatrix}"),
        (r"\sum_{k=1}^{n} k", r"\frac{n(n-1)}{2}"),
    ],
    "for math-verify": [
        (r"\int_0^1 x\,dx", "1/3"), (r"\sum_{k=1}^{3} k", "7"),
    ],
}

BOMBS = [
    "9**9**9", "9^{9^9}", "9^{9^{9^9}}", "10^{10^{10}}", "10^{10^{10^{10}}}", "(10^{10})^{10^{10}}",
    "factorial(10**9)", "1000000000!", "(10^9)!", "((9!)!)!", "9!!!!", r"\binom{10^9}{5\cdot 10^8}",
    "2^{2^{2^{2^{2^{2}}}}}", "1e999999999", "e^{e^{e^{e^{e^e}}}}", r"\sin(10^{10^6})", "x^{10^{12}}",
    "(x+1)^{99999999}", r"\prod_{k=1}^{10^9} k", r"\sum_{k=1}^{10^9} k!", "0.000000000001^{-1000000}",
    r"\sum_{k=1}^{10^{10}} \frac{1}{k^2}", "((((((2^{1000})^{1000})^{1000})^{1000})^{1000})^{1000})",
    r"\gcd(10^{1000},10^{999})^{10^9}", "999999999^{999999999}", r"\lfloor 10^{10^7} \rfloor", r"\tan(10^{10^5})",
    "(" * 2000,
    "(" * 500 + "1" + ")" * 500,
    "{" * 500 + "1" + "}" * 500,
    r"\sqrt{" * 250 + "2" + "}" * 250,
    r"\frac{" * 170 + "1" + "}{2}" * 170,
    "-" * 1900 + "1",
    "1+" * 900 + "1",
    "2^" * 900 + "2",
    "x" * 1900,
    "9" * 1900,
    "9" * 1000 + "^" + "9" * 900,
    r"\int" * 200,
    "1," * 900,
    "|" * 1500,
    "!" * 1500,
    r"\pm 1" * 300,
    "1:" * 900 + "1",
    r"\{" * 900,
    "a_" * 900,
    "'" * 1900,
    r"\begin{pmatrix}" * 100,
    r"\log" * 450,
    "sin" * 600,
]
# fmt: on


def cases(table: dict[str, list[tuple[str, str]]]) -> list[object]:
    return [pytest.param(*pair, id=f"{kind}: {pair[0]} ~ {pair[1]}") for kind, pairs in table.items() for pair in pairs]


def box(text: str) -> str:
    return rf"So it is $\boxed{{{text}}}$."


@pytest.mark.parametrize(("reference", "answer"), cases(EQUAL))
def test_equal(reference: str, answer: str) -> None:
    assert same_answer(reference, answer)
    assert math(box(answer), reference, {}).value == 1


@pytest.mark.parametrize(("reference", "answer"), cases(UNEQUAL))
def test_unequal(reference: str, answer: str) -> None:
    score = math(box(answer), reference, {})
    assert score.value == 0 and score.valid and score.detail


@pytest.mark.parametrize("bomb", BOMBS, ids=lambda bomb: bomb[:40])
@pytest.mark.parametrize("reference", ["7", "x^2+1"])
def test_bombs_are_wrong_at_once(bomb: str, reference: str) -> None:
    start = time.process_time()
    score = math(box(bomb), reference, {})
    assert score.value == 0 and score.valid
    assert time.process_time() - start < 20


@pytest.mark.parametrize(
    "unit", [r"\frac{1}{2}+", r"\boxed{", "<answer>", "#### 1\n", "The answer is ", "$x$ ", r"\[", "(1,", "a"]
)
def test_long_responses_are_read_quickly(unit: str) -> None:
    start = time.process_time()
    assert math(unit * (100_000 // len(unit)), "12345", {}).value == 0
    assert time.process_time() - start < 20


@pytest.mark.parametrize(
    ("response", "reference"),
    [
        # the last complete box counts
        (box("3") + " No: " + box("4"), "4"),
        (box("4") + r" Then \boxed{unfinished", "4"),
        (r"\boxed{x = \boxed{5}}", "5"),
        (box("7") + " The answer is 8", "7"),
        (r"\fbox{7}", "7"),
        (r"\boxed 7", "7"),
        (r"\boxed{1} and \boxed{2}", "1, 2"),
        # several boxes for several answers
        (r"We find $x = \boxed{3}$. Then $y = \boxed{4}$.", "3, 4"),
        (r"We find $x = \boxed{3}$. Then $y = \boxed{4}$.", "(3, 4)"),
        ("(a) The sum is $\\boxed{7}$.\n\n(b) The product is $\\boxed{12}$.", "7, 12"),
        # several references, each of them right
        (box("18"), ["17", "18"]),
        (box("0.5"), ("2", r"\frac12")),
        # dollars of money and of formulas
        ("It costs $10,200 and $255 more. The final answer is $10,455$", "10455"),
        (r"It costs $10,200 and \$255. Therefore $x = 10,455$.", "10455"),
        (r"$10,200 and \$255. Therefore $x = 10,455$.", "10455"),
        ("He pays $255. So the total is $x = 10,455$.", "10455"),
        ("He pays $255 of $10,710; what is left is $y$, and $y = 10,455$.", "10455"),
        # several formulas at the end of a sentence, and what the answer is not
        ("So we get $a + bc$.", "bc+a"),
        ("It is $-i$.", "-i"),
        ("The solutions are $-4$ and $9$.", "-4, 9"),
        (r"Hence the roots are \(1\), \(2\) and \(\sqrt 3\).", r"1, 2, \sqrt{3}"),
        ("The answer is 17, not 71.", "17"),
        ("The answer is $x = 3$ and not $x = 5$.", "3"),
        ("The answer is 17 rather than 71.", "17"),
        ("The answer is that all but one of the 12 dollars were lost, so it is 12 - 1 = $11", "11"),
        ("The answer is 12, which is 3 * 5 - 3", "12"),
        ("The answer is 12 pens, so he needs 2 boxes of 6", "12"),
        ("The answer is that with 2 years instead of 5, he pays 250 - 100 = $150", "150"),
        ("The answer is: does not exist", "does not exist"),
        # question and answer
        ("A: 18", "18"),
        ("Q: How many?\nA: There are 18 of them.", "18"),
        ("**A:** 18", "18"),
        ("A: 18 cm", "A"),
        (box("10000"), "answer is 10000"),
        (box("10000"), "Answer: 10000"),
        # no box
        ("12", "12"),
        ("1+x^2", "x^2+1"),
        ("sqrt(2)", r"\sqrt{2}"),
        (r"$\frac{3}{4}$", "0.75"),
        (r"\[ x = \frac{3}{4} \]", "3/4"),
        (r"The final answer is \(\frac{3}{4}\).", "3/4"),
        (r"The answer is 5\sqrt{2}.", r"\sqrt{50}"),
        ("The answer is (C).", "C"),
        ("I think it's (D).", "D"),
        ("Weighing the options...\n\nC", "C"),
        ("The answer is for sure D, it can't be A or B", "D"),
        ("not (A), rather (C)", "C"),
        ("B。不是 A", "B"),
        ("C", "C. the third one"),
        ("the answer is c", "C"),
        ("AB=9, CD=4", "AB=9, CD=4"),
        ("The answer is 5!", "5"),
        ("#### 5!", "120"),
        ("So we get $$5!$$", "120"),
        ("Final Answer: The largest $n$ is 34.", "34"),
        ("Therefore, the probability is \\frac{3}{4}", "0.75"),
        ("the coordinates are (2, 3)", "(2,3)"),
        ("so x = - 4", "-4"),
        ("所以一共有42个苹果。", "42"),
        ("Таким образом, всего 42 яблока.", "42"),
        ("따라서 42개입니다.", "42"),
        ("إذن المجموع هو 42.", "42"),
        ("الإجابة النهائية هي ٤٢", "42"),
        ("答案：每份应该是 (\\frac{2}{5}) 吨。", "2/5"),
        (r"\boxed{\text{Answer: } 7}", "7"),
        ("#### The answer is 7", "7"),
        (r"\boxed{5} oops \boxed{}", "5"),
        ("3 feet 4 inches", "40 inches"),
        ("**Answer: 12**", "12"),
        ("so 6*7 = 42", "42"),
        ("She pays $5 and gets $2 back, so she spent $3 in all.", "3"),
        ("#### 72", "72"),
        ("答案是 5", "5"),
        ("Monday", "Monday"),
        ("no solution", "no solution"),
        ("<think>It is 5. \\boxed{5}</think>The answer is 6.", "6"),
        # the reference in its wrappings
        ("12", "$12$"),
        ("12", r"We add and get \boxed{12}"),
        ("72", "48 + 24 = 72\n#### 72"),
        (box("12"), 12),
        (box("0.5"), 0.5),
        ("145", 145.0),
    ],
)
def test_right(response: str, reference: object) -> None:
    assert math(response, reference, {}).value == 1


@pytest.mark.parametrize(
    ("response", "reference"),
    [
        ("", "1"),
        ("I do not know", "1"),
        (box(""), "1"),
        (box("3") + " No: " + box("4"), "3"),
        (r"\boxed{1} and \boxed{2}", "2"),
        (r"We find $x = \boxed{3}$. Then $y = \boxed{4}$.", "3"),
        (r"We find $x = \boxed{3}$. Then $y = \boxed{5}$.", "3, 4"),
        (r"\boxed{3} or rather \boxed{4} or rather \boxed{5}", "3, 4"),
        ("A: 18\nB: 20", "18"),
        ("The solutions are $-4$ and $9$.", "9"),
        ("The answer is 17, not 71.", "71"),
        ("The answer is not 17.", "17"),
        ("It costs $10,200 and $255 more. The final answer is $10,455$", "255"),
        (r"5\sqrt{2}", "5"),
        (r"The answer is 5\sqrt{2}.", "5"),
        ("the answer is 5 or 6", "5"),
        ("#### 5!", "5"),
        ("<answer>5!</answer>", "5"),
        ("The answer is $5!$.", "5"),
        ("The answer is between 41 and 42", "42"),
        ("Final Answer: The largest $n$ is 34.", "n"),
        ("Candidates: 1, 2, 3, 4, 5, 6, 7", "7"),
        ("so x = - 4", "4"),
        ("the coordinates are (2, 3)", "3"),
        ("The set is {1, 2, 3}", "3"),
        ("the solution is x > 4", "4"),
        ("we get 3√5", "5"),
        ("it is equal to log_2 5", "5"),
        ("the time is 12:30", "30"),
        ("In step 5", "5"),
        ("It costs 2,74 in all.", "4"),
        ("It can't be (D).", "D"),
        ("I would take A or B.", "A"),
        (r"\boxed{C} I also like (D).", "D"),
        ("the answer is 5 or 6", "6"),
        ("so we get 2 + 3", "3"),
        (box(r"\frac{1}{"), "1"),
        ("{" * 2_000, "1"),
        ("1+" * 1_000 + "1", "1"),
        (r"\boxed{" * 2_000, "1"),
        ("\ud800\x00", "1"),
    ],
)
def test_wrong(response: str, reference: str) -> None:
    score = math(response, reference, {})
    assert score.value == 0 and score.valid


@pytest.mark.parametrize("reference", ["", "  ", r"\boxed{}", "x" * 5_000, [], ["1", ""]])
def test_a_reference_without_an_answer_is_an_error(reference: str) -> None:
    assert not math("1", reference, {}).valid


@pytest.mark.parametrize(
    ("response", "value"),
    [(box("5"), 1), ("#### 5", 1), ("The answer is 5", 0), ("5", 0), ("<answer>5</answer>", 0)],
)
def test_strict_takes_boxes_and_hashes_only(response: str, value: float) -> None:
    assert math(response, "5", {}, strict=True).value == value


def test_the_order_of_extraction_decides() -> None:
    response = r"\boxed{1} The answer is 2. #### 3"
    assert math(response, "1", {}).value == 1
    assert math(response, "2", {}, extract="phrase,boxed").value == 1
    assert math(response, "3", {}, extract="hash").value == 1
    with pytest.raises(VerifierError, match="extract must list some of boxed"):
        math(response, "1", {}, extract="magic")
    with pytest.raises(VerifierError, match="strict extraction needs one of"):
        math(response, "1", {}, extract="last", strict=True)


@pytest.mark.parametrize(
    ("answer", "reference", "tolerance", "value"),
    [
        ("3.14", r"\pi", 0.001, 1),
        ("3.1", r"\pi", 0.001, 0),
        ("0.333", "1/3", 0.01, 1),
        ("(1.001, 2)", "(1,2)", 0.01, 1),
    ],
)
def test_tolerance(answer: str, reference: str, tolerance: float, value: float) -> None:
    assert math(box(answer), reference, {}, tolerance=tolerance).value == value


# The limit may strike in a callback of the garbage collector (hypothesis has one), where it is lost, and comes again.
@pytest.mark.thorough(keep=1)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    "slow",
    [
        r"\sum_{n=1}^{\infty} \frac{\sin(n^2)}{n^3+\sqrt{n}}",
        r"\begin{vmatrix} a&b&c&d\\e&f&g&h\\i&j&k&l\\m&n&o&p\end{vmatrix}^{20}",
        r"\int_0^{100} e^{\sin(\cos(x^{10}))} dx",
        r"\sum_{a=1}^{30} \sum_{b=1}^{30} \sum_{c=1}^{30} abc",
    ],
)
def test_what_takes_long_is_wrong_in_time(slow: str) -> None:
    math_verify_agrees(r"\int_0^1 x\,dx", "1/2")  # imports sympy
    start = time.thread_time()
    assert math(box(slow), "3", {}).value == 0
    assert time.thread_time() - start < 4
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0.0, 0.0)


def test_math_verify_cannot_overrule_the_numbers() -> None:
    assert not math_verify_agrees(r"1-\frac{1}{e}", r"1+\frac{1}{e}")
    assert not math_verify_agrees(r"\frac{e-1}{e}", r"\frac{e+1}{e}")
    assert math_verify_agrees(r"\frac{e-1}{e}", r"1-\frac{1}{e}")


SIGNS = "0123456789.,;:+-*/^_=<>()[]{}|!%$&'~ xyeiAB\\\n\x00\ud800°√½²π∞答"
COMMANDS = (
    r"\frac \sqrt \boxed{ \text{ \begin{pmatrix} \end{pmatrix} \pm \cup \infty \sin \log_ \left( \right] \{ \} \in \le "
    r"\binom #### cm and ^\circ the answer is 1e5 .5 1e9999 _2 \overline"
)
PIECES = st.sampled_from([*SIGNS, *(f"{command} " for command in COMMANDS.split()), *COMMANDS.split()])


@pytest.mark.parametrize(
    ("reference", "answer"),
    [
        ("5", r"\frac.5 2"),
        ("5", r"\frac1e52"),
        ("5", r"x_1e5"),
        ("1010_2", "1e9999"),
        ("5", r"\overline{1e9999}"),
        ("2e/i<5", "2e/i<6"),
        ("x+y=1010_2", "y+x=1011_2"),
        ("x+y=3:4", "y+x=4:3"),
        ("5", "9" * 5_000),
        ("5", r"\begin{vmatrix}\end{vmatrix}"),
        ("5", r"\begin{cases}\end{cases}"),
        ("5", "5" + "=a" * 1_500),
    ],
)
def test_odd_notation_is_a_wrong_answer(reference: str, answer: str) -> None:
    assert not same_answer(reference, answer)
    assert not same_answer(answer, reference)


@settings(max_examples=150, deadline=None)
@given(
    st.text() | st.lists(PIECES, max_size=25).map("".join), st.sampled_from(["5", "x^2+1", "(1,2]", r"\text{yes}", "A"])
)
def test_never_raises(response: str, reference: str) -> None:
    score = math(response, reference, {})
    assert score.valid and score.value in (0, 1)
    json.dumps(score.detail)


@settings(max_examples=100, deadline=None)
@given(st.lists(PIECES, min_size=1, max_size=12).map("".join))
def test_an_answer_is_the_same_as_itself(answer: str) -> None:
    assert same_answer(answer, answer)


@settings(max_examples=100, deadline=None)
@given(st.fractions(min_value=-1000, max_value=1000, max_denominator=200), st.integers(1, 5))
def test_a_fraction_equals_itself_in_other_terms(number: object, factor: int) -> None:
    top, bottom = number.numerator, number.denominator  # type: ignore[attr-defined]
    assert same_answer(f"{top}/{bottom}", rf"\dfrac{{{top * factor}}}{{{bottom * factor}}}")
    assert not same_answer(f"{top}/{bottom}", rf"\frac{{{top * factor + 1}}}{{{bottom * factor}}}")
