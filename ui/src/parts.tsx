// Small things that several pages use.
import type { ComponentChildren } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import type { Loaded } from "./api";
import { link } from "./router";
import type { HeldOut } from "./records";
import { fixed } from "./format";

export function Status({ status }: { status: string }) {
  return <span class={`status ${status}`}><i />{status}</span>;
}

/** A reward as a chip: right, wrong, in between, or not judged. */
export function Reward({ value, outcome }: { value: number | null; outcome: string }) {
  if (outcome === "error" || value === null) return <span class="chip warn">not judged</span>;
  const kind = value >= 1 ? "good" : value <= 0 ? "bad" : "half";
  return <span class={`chip ${kind}`}>{Number.isInteger(value) ? value : fixed(value, 2)}</span>;
}

export function Held({ point }: { point: HeldOut | null }) {
  if (!point) return <>–</>;
  return (
    <span title={point.low === null ? "" : `95 % interval ${fixed(point.low)}–${fixed(point.high)}`}>{fixed(point.mean)}</span>
  );
}

/** What stands in for data: an error, or that it is on its way. */
export function Waiting({ state, what }: { state: Loaded<unknown>; what: string }) {
  if (state.error) return <p class="notice bad" role="alert">{state.error}</p>;
  return <p class="notice muted" aria-busy="true">{what} …</p>;
}

export function Empty({ children }: { children: ComponentChildren }) {
  return <p class="notice muted">{children}</p>;
}

export function Stat({ name, children, hint }: { name: string; children: ComponentChildren; hint?: string | undefined }) {
  return <div class="stat" title={hint}><dt>{name}</dt><dd>{children}</dd></div>;
}

/** A text field that speaks after a pause. */
export function Field(props: {
  label: string; value: string; onChange: (value: string) => void; type?: "text" | "number"; placeholder?: string; wide?: boolean; search?: boolean;
}) {
  const [text, setText] = useState(props.value);
  const timer = useRef(0);
  useEffect(() => setText(props.value), [props.value]);
  const say = (value: string, wait: number) => {
    setText(value);
    clearTimeout(timer.current);
    timer.current = window.setTimeout(() => props.onChange(value), wait);
  };
  const common = {
    value: text,
    placeholder: props.placeholder ?? "",
    ...(props.search ? { "data-search": "" } : {}),
    onInput: (event: { currentTarget: HTMLInputElement }) => say(event.currentTarget.value, 350),
    onKeyDown: (event: { key: string; currentTarget: HTMLInputElement }) => { if (event.key === "Enter") say(event.currentTarget.value, 0); },
  };
  return (
    <label class={`field${props.wide ? " wide" : ""}`}>
      <span>{props.label}</span>
      {props.type === "number" ? <input type="number" step="any" {...common} /> : <input type="text" {...common} />}
    </label>
  );
}

export function Choice(props: { label: string; hint?: string; value: string; of: [string, string][]; onChange: (value: string) => void }) {
  return (
    <label class="field" title={props.hint}>
      <span>{props.label}</span>
      <select value={props.value} onChange={(event) => props.onChange(event.currentTarget.value)}>
        {props.of.map(([value, name]) => <option key={value} value={value} selected={value === props.value}>{name}</option>)}
      </select>
    </label>
  );
}

export const GROUP_PAGE = (run: string, group: number, sample?: number) => link(["run", run, "group", group], { sample });
