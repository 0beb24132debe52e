// Light or dark: as the system says, unless the reader chose. Paper is light.
import { useEffect, useState } from "preact/hooks";

export type Theme = "system" | "light" | "dark";
const KEY = "kitae-theme";
const dark = matchMedia("(prefers-color-scheme: dark)");
const paper = matchMedia("print");
const listeners = new Set<() => void>();

function stored(): Theme {
  try {
    const found = localStorage.getItem(KEY);
    return found === "light" || found === "dark" ? found : "system";
  } catch {
    return "system";
  }
}

let chosen = stored();

export function isDark(): boolean {
  return !paper.matches && (chosen === "dark" || (chosen === "system" && dark.matches));
}

function show(): void {
  document.documentElement.dataset["theme"] = isDark() ? "dark" : "light";
  listeners.forEach((tell) => tell());
}

export function startTheme(): void {
  dark.addEventListener("change", show);
  paper.addEventListener("change", show);
  show();
}

export function nextTheme(): void {
  chosen = chosen === "system" ? (dark.matches ? "light" : "dark") : chosen === (dark.matches ? "light" : "dark") ? (dark.matches ? "dark" : "light") : "system";
  try {
    localStorage.setItem(KEY, chosen);
  } catch {
    // a browser that keeps nothing still shows the theme until it is closed
  }
  show();
}

export function useTheme(): { theme: Theme; dark: boolean } {
  const [state, setState] = useState({ theme: chosen, dark: isDark() });
  useEffect(() => {
    const tell = () => setState({ theme: chosen, dark: isDark() });
    listeners.add(tell);
    return () => void listeners.delete(tell);
  }, []);
  return state;
}

/** A colour of the style sheet, for canvases. */
export function colour(name: string): string {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

export const SERIES = ["s1", "s2", "s3", "s4", "s5", "s6", "s7", "s8", "s9"];
