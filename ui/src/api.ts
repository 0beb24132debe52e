// Answers to the questions of the pages: from the server, or, in a report, from the file itself.
import { useEffect, useRef, useState } from "preact/hooks";
import type {
  RunComparison, ConsoleEnd, Diagnosis, ErrorList, GroupView, PromptPage, RolloutPage, RunDetail, RunSummary, SampleTokens,
  LaneView, RunReport, Series,
} from "./records";

const run = (key: string) => `/api/runs/${encodeURIComponent(key)}`;

/** An address with the type of its answer. */
export interface Ask<T> {
  readonly url: string;
  readonly answer?: T;
}

export const ask = {
  runs: (): Ask<RunSummary[]> => ({ url: "/api/runs" }),
  run: (key: string): Ask<RunDetail> => ({ url: run(key) }),
  series: (key: string, names: string[]): Ask<Series> => ({
    url: `${run(key)}/series?names=${names.map(encodeURIComponent).join(",")}`,
  }),
  rollouts: (key: string, query: string): Ask<RolloutPage> => ({ url: `${run(key)}/rollouts?${query}` }),
  group: (key: string, group: number): Ask<GroupView> => ({ url: `${run(key)}/groups/${group}` }),
  tokens: (key: string, group: number, sample: number): Ask<SampleTokens> => ({
    url: `${run(key)}/groups/${group}/tokens/${sample}`,
  }),
  prompts: (key: string, query: string): Ask<PromptPage> => ({ url: `${run(key)}/prompts?${query}` }),
  errors: (key: string): Ask<ErrorList> => ({ url: `${run(key)}/errors` }),
  timeline: (key: string, query: string): Ask<LaneView> => ({ url: `${run(key)}/timeline?${query}` }),
  console: (key: string): Ask<ConsoleEnd> => ({ url: `${run(key)}/console` }),
  diagnosis: (key: string): Ask<Diagnosis> => ({ url: `${run(key)}/diagnosis` }),
  compare: (keys: string[]): Ask<RunComparison> => ({
    url: `/api/compare?runs=${keys.map(encodeURIComponent).join(",")}`,
  }),
  report: (key: string): Ask<RunReport> => ({ url: `${run(key)}/report` }),
};

const element = document.getElementById("kitae-answers");
/** The answers that a report holds, by the path of their address; null on a page that a server has sent. */
const inlined = element && (JSON.parse(element.textContent ?? "{}") as Record<string, unknown>);

/** This page is a file with its answers in it: it asks no server and never changes. */
export const isReport = inlined !== null;

function fromFile<T>(url: string, answers: Record<string, unknown>): T {
  const path = url.split("?")[0]!;
  if (!(path in answers)) throw new Error("This file does not hold it.");
  return answers[path] as T;
}

export async function get<T>(question: Ask<T>, signal?: AbortSignal): Promise<T> {
  if (inlined) return fromFile<T>(question.url, inlined);
  const response = await fetch(question.url, signal ? { signal } : {});
  const type = response.headers.get("content-type") ?? "";
  if (!type.startsWith("application/json")) throw new Error((await response.text()) || response.statusText);
  const body = await response.json();
  if (!response.ok) throw new Error(body.error ?? response.statusText);
  return body as T;
}

/** Write something; the page hears of the change as of any other. */
export async function send(url: string, body: unknown): Promise<void> {
  const response = await fetch(url, { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body) });
  if (response.ok) return;
  const text = await response.text();
  throw new Error(text.startsWith("{") ? JSON.parse(text).error : text || response.statusText);
}

export interface Loaded<T> {
  data: T | null;
  error: string;
}

/** The answer to a question; asked again when the question changes, or a run that it is about does. What was there
 * before stays on the screen until the new answer has come, as long as the question is the same. */
export function useData<T>(question: Ask<T> | null, runs: string[] | null = null): Loaded<T> {
  const [state, setState] = useState<Loaded<T> & { url: string }>({ data: null, error: "", url: "" });
  const version = useChanges(runs);
  const url = question?.url ?? "";
  useEffect(() => {
    if (!url) return;
    const stop = new AbortController();
    get<T>({ url }, stop.signal).then(
      (data) => setState({ data, error: "", url }),
      (error: Error) => {
        if (error.name !== "AbortError") setState((old) => ({ data: old.url === url ? old.data : null, error: error.message, url }));
      },
    );
    return () => stop.abort();
  }, [url, version]);
  return state.url === url ? state : { data: null, error: "" };
}

type Listener = (runs: string[]) => void;
const listeners = new Set<Listener>();
let connected = false;
const connectionListeners = new Set<(on: boolean) => void>();

/** Server-sent events, for as long as the page is open; the browser connects again by itself. */
export function listen(): void {
  const source = new EventSource("/api/live");
  const set = (on: boolean) => {
    const again = on && !connected;
    connected = on;
    connectionListeners.forEach((tell) => tell(on));
    if (again) listeners.forEach((tell) => tell([]));
  };
  source.onopen = () => set(true);
  source.onerror = () => set(false);
  source.onmessage = (event) => {
    const { runs } = JSON.parse(event.data) as { runs: string[] };
    listeners.forEach((tell) => tell(runs));
  };
}

export function useConnected(): boolean {
  const [on, setOn] = useState(connected);
  useEffect(() => {
    connectionListeners.add(setOn);
    return () => void connectionListeners.delete(setOn);
  }, []);
  return on;
}

/** A number that grows when one of these runs changes (null: any), at most once a second. */
function useChanges(runs: string[] | null): number {
  const [version, setVersion] = useState(0);
  const wanted = useRef(runs);
  wanted.current = runs;
  useEffect(() => {
    let timer = 0;
    const tell: Listener = (changed) => {
      if (changed.length && wanted.current && !wanted.current.some((key) => changed.includes(key))) return;
      if (!timer) timer = window.setTimeout(() => { timer = 0; setVersion((v) => v + 1); }, 300);
    };
    listeners.add(tell);
    return () => { listeners.delete(tell); window.clearTimeout(timer); };
  }, []);
  return version;
}
