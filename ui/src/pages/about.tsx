// What a run was told, what happened to it, and what is wrong with it.
import { useEffect, useRef, useState } from "preact/hooks";
import { ask, useData } from "../api";
import { clock, setting } from "../format";
import { Empty, Waiting } from "../parts";
import type { RunDetail } from "../records";

/** Settings that differ from their defaults first; `folded`: the others open on demand. */
export function Config({ run, folded = false }: { run: RunDetail; folded?: boolean }) {
  const [filter, setFilter] = useState("");
  const shown = run.settings.filter(({ key, value }) => `${key} ${setting(value)}`.toLowerCase().includes(filter.toLowerCase()));
  const changed = shown.filter((row) => row.changed), rest = shown.filter((row) => !row.changed);
  if (!run.settings.length) return <Empty>The settings of this run cannot be read.</Empty>;
  return (
    <>
      <div class="bar"><label class="field wide"><span>filter</span><input type="search" data-search value={filter} onInput={(event) => setFilter(event.currentTarget.value)} /></label></div>
      {changed.length > 0 && <Settings title="Changed" rows={changed} />}
      {rest.length > 0 && (folded && !filter
        ? <details><summary>The {rest.length} others have their default values</summary><Settings title="Defaults" rows={rest} /></details>
        : <Settings title={changed.length ? "Defaults" : "Settings"} rows={rest} />)}
      <p class="muted small">{run.summary.folder}</p>
    </>
  );
}

function Settings({ title, rows }: { title: string; rows: RunDetail["settings"] }) {
  return (
    <section>
      <h3>{title} <span class="muted">{rows.length}</span></h3>
      <div class="card flush"><table class="plain settings"><tbody>
        {rows.map((row) => <tr key={row.key}><td>{row.key}</td><td class={row.changed ? "differs" : ""}>{setting(row.value)}</td></tr>)}
      </tbody></table></div>
    </section>
  );
}

export function Log({ run }: { run: RunDetail }) {
  const key = run.summary.key;
  const state = useData(ask.console(key), [key]);
  const box = useRef<HTMLPreElement>(null);
  useEffect(() => { if (box.current) box.current.scrollTop = box.current.scrollHeight; }, [state.data?.text]);
  return (
    <>
      <h3>Events <span class="muted">{run.events.length}</span></h3>
      <Events run={run} />
      <h3>Console</h3>
      {!state.data ? <Waiting state={state} what="Reading the console" /> : state.data.text ? (
        <>{!state.data.complete && <p class="muted small">Only the end is shown.</p>}<pre class="card console" tabIndex={0} ref={box}>{state.data.text}</pre></>
      ) : <Empty>Nothing was written.</Empty>}
    </>
  );
}

export function Events({ run }: { run: RunDetail }) {
  if (!run.events.length) return <Empty>Nothing has happened yet.</Empty>;
  return (
    <div class="card flush"><table class="plain events"><tbody>
      {run.events.map((event, i) => <tr key={i}><td class="muted nowrap">{clock(event.time)}</td><td><b>{event.kind}</b></td><td class="breaks">{event.detail}</td></tr>)}
    </tbody></table></div>
  );
}

export function Findings({ run }: { run: RunDetail }) {
  const key = run.summary.key;
  const state = useData(ask.diagnosis(key), [key]);
  if (!state.data) return <Waiting state={state} what="Looking for problems" />;
  if (!state.data.findings.length) return <Empty>Nothing stands out: none of {state.data.rules} rules has found a problem.</Empty>;
  return (
    <>
      {state.data.findings.map((finding, i) => (
        <section key={i} class="card finding">
          <div class="bar"><span class={`chip ${finding.severity === "bad" ? "bad" : "warn"}`}>{finding.severity}</span><h3>{finding.title}</h3><span class="grow" /><code class="muted small">{finding.rule}</code></div>
          <p class="evidence">{finding.evidence}</p>
          <p class="advice">{finding.advice}</p>
        </section>
      ))}
    </>
  );
}
