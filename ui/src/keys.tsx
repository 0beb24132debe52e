// Everything by keyboard.
import { useEffect, useRef, useState } from "preact/hooks";
import { place } from "./router";
import { nextTheme } from "./theme";

const HELP: [string, string][] = [
  ["j  k", "next, previous row"],
  ["Enter", "open it"],
  ["1 … 8", "pages of a run"],
  ["[  ]", "previous, next group"],
  ["←  →", "previous, next token, where tokens have the focus"],
  ["/", "filter"],
  ["u", "up: from a group to the rollouts, from a run to all runs"],
  ["t", "light, dark, or as the system"],
  ["?", "this list"],
];

export function useKeys(help: () => void): void {
  useEffect(() => {
    const press = (event: KeyboardEvent) => {
      const target = event.target as HTMLElement;
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      if (target.matches("input, select, textarea")) {
        if (event.key === "Escape") target.blur();
        return;
      }
      if (!act(event.key, help)) return;
      event.preventDefault();
    };
    addEventListener("keydown", press);
    return () => removeEventListener("keydown", press);
  }, []);
}

function act(key: string, help: () => void): boolean {
  if (key === "j" || key === "k") return step(key === "j" ? 1 : -1);
  if (key === "/") return focusSearch();
  if (key === "t") { nextTheme(); return true; }
  if (key === "?") { help(); return true; }
  if (key === "u") { up(); return true; }
  const tab = /^[1-8]$/.test(key) ? document.querySelectorAll<HTMLAnchorElement>("nav.pages a")[Number(key) - 1] : null;
  tab?.click();
  return Boolean(tab);
}

function step(by: number): boolean {
  const rows = [...document.querySelectorAll<HTMLElement>("[data-row]")];
  if (!rows.length) return false;
  const now = rows.indexOf(document.activeElement as HTMLElement);
  const next = rows[Math.max(0, Math.min(rows.length - 1, now < 0 ? (by > 0 ? 0 : rows.length - 1) : now + by))]!;
  next.focus();
  next.scrollIntoView({ block: "nearest" });
  return true;
}

function focusSearch(): boolean {
  const menu = document.querySelector<HTMLDetailsElement>("details.picker");
  if (menu) menu.open = true;
  const found = document.querySelector<HTMLElement>("[data-search]");
  found?.focus();
  return Boolean(found);
}

function up(): void {
  const { path } = place();
  if (path[2] === "group") location.hash = `#/run/${encodeURIComponent(path[1]!)}/rollouts`;
  else location.hash = "#/";
}

export function Help({ open, close }: { open: boolean; close: () => void }) {
  const dialog = useRef<HTMLDialogElement>(null);
  const [shown, setShown] = useState(false);
  useEffect(() => {
    if (open && !shown) dialog.current?.showModal();
    if (!open && shown) dialog.current?.close();
    setShown(open);
  }, [open]);
  return (
    <dialog ref={dialog} onClose={close} onClick={(event) => { if (event.target === dialog.current) close(); }} aria-label="Keys">
      <h2>Keys</h2>
      <table class="plain"><tbody>{HELP.map(([key, what]) => <tr key={key}><td class="nowrap">{key.split("  ").map((one) => <kbd key={one}>{one}</kbd>)}</td><td>{what}</td></tr>)}</tbody></table>
      <button onClick={close}>Close</button>
    </dialog>
  );
}
