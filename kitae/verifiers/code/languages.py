"""The languages of programs: how each is recognised and run."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Language:
    """How a language is recognised and run; words with {braces} are filled in, programs are looked up.

    `reserves`: whether its runtime reserves far more address space than it uses. `native`: whether recursion uses the
    machine's stack.
    """

    tags: tuple[str, ...]
    file: str = ""
    compile: tuple[str, ...] = ()
    run: tuple[str, ...] = ()
    reserves: bool = False
    native: bool = False


LANGUAGES: dict[str, Language] = {
    "python": Language(("python", "py", "python3")),
    "bash": Language(("bash", "sh", "shell"), "main.sh", run=("bash", "main.sh")),
    "javascript": Language(("javascript", "js", "node"), "main.js", run=("node", "main.js"), reserves=True),
    "ruby": Language(("ruby", "rb"), "main.rb", run=("ruby", "main.rb")),
    "perl": Language(("perl", "pl"), "main.pl", run=("perl", "main.pl")),
    "php": Language(("php",), "main.php", run=("php", "main.php")),
    "lua": Language(("lua",), "main.lua", run=("lua", "main.lua")),
    "c": Language(("c",), "main.c", ("gcc", "-O2", "-o", "main", "main.c", "-lm"), ("./main",), native=True),
    "cpp": Language(
        ("cpp", "c++", "cc", "cxx"),
        "main.cpp",
        ("g++", "-O2", "-std=c++17", "-o", "main", "main.cpp"),
        ("./main",),
        native=True,
    ),
    "java": Language(
        ("java",),
        "{class}.java",
        ("javac", "-d", ".", "{class}.java"),
        ("java", "-Xmx{heap}m", "-Xss64m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "{class}"),
        reserves=True,
    ),
    "go": Language(("go", "golang"), "main.go", ("go", "build", "-o", "main", "main.go"), ("./main",), reserves=True),
    "rust": Language(("rust", "rs"), "main.rs", ("rustc", "-O", "-o", "main", "main.rs"), ("./main",), native=True),
}
