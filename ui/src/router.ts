// Addresses are hashes: every view can be linked to, and the browser's history works.
import { useEffect, useState } from "preact/hooks";

export interface Place {
  path: string[];
  query: URLSearchParams;
}

export function place(): Place {
  const [path = "", query = ""] = location.hash.replace(/^#\/?/, "").split("?", 2);
  return { path: path.split("/").filter(Boolean).map(decodeURIComponent), query: new URLSearchParams(query) };
}

export function usePlace(): Place {
  const [now, setNow] = useState(place);
  useEffect(() => {
    const move = () => setNow(place());
    addEventListener("hashchange", move);
    return () => removeEventListener("hashchange", move);
  }, []);
  return now;
}

type Query = Record<string, string | number | null | undefined>;

export function link(path: (string | number)[], query: Query = {}): string {
  const asked = new URLSearchParams();
  for (const [name, value] of Object.entries(query)) if (value !== null && value !== undefined && value !== "") asked.set(name, String(value));
  const text = asked.toString();
  return `#/${path.map((part) => encodeURIComponent(String(part))).join("/")}${text ? `?${text}` : ""}`;
}

/** The same page with other parameters. */
export function altered(changes: Query): string {
  const { path, query } = place();
  return link(path, { ...Object.fromEntries(query), ...changes });
}

/** Go to the same page with other parameters; without a new entry in the history unless asked for. */
export function alter(changes: Query, remember = false): void {
  const to = altered(changes);
  if (remember) location.hash = to;
  else {
    history.replaceState(null, "", to);
    dispatchEvent(new HashChangeEvent("hashchange"));
  }
}
