// All runs, the one that changed last first.
import { useState } from "preact/hooks";
import { ask, useData } from "../api";
import { Spark } from "../chart";
import { ago, number, fixed, seconds, size } from "../format";
import { Empty, Held, Status, Waiting } from "../parts";
import type { RunSummary } from "../records";
import { link } from "../router";

const MOST = 6;

export function Runs() {
  const state = useData(ask.runs());
  const [chosen, setChosen] = useState<string[]>([]);
  if (!state.data) return <Waiting state={state} what="Looking for runs" />;
  const runs = state.data;
  if (!runs.length) return <Empty>No runs here yet. Start one with <code>kitae train quickstart</code>; it will appear by itself.</Empty>;
  const toggle = (key: string) =>
    setChosen((old) => (old.includes(key) ? old.filter((other) => other !== key) : [...old, key].slice(-MOST)));
  return (
    <>
      <div class="bar">
        <h1>Runs <span class="muted">{runs.length}</span></h1>
        <span class="grow" />
        {chosen.length >= 2
          ? <a class="button" href={link(["compare"], { runs: chosen.join(",") })}>Compare {chosen.length}</a>
          : <span class="muted small">Tick two or more to compare</span>}
      </div>
      <div class="card flush">
        <table class="rows">
          <thead>
            <tr>
              <th><span class="hidden">compare</span></th><th>run</th><th>status</th><th class="num">step</th><th>curve</th><th class="num">last reward</th>
              <th class="num">held out</th><th class="num">s/step</th><th class="num">tok/s</th><th class="num">ETA</th><th class="num">size</th><th class="num">changed</th>
            </tr>
          </thead>
          <tbody>{runs.map((run) => <Row key={run.key} run={run} chosen={chosen.includes(run.key)} toggle={() => toggle(run.key)} />)}</tbody>
        </table>
      </div>
    </>
  );
}

function Row({ run, chosen, toggle }: { run: RunSummary; chosen: boolean; toggle: () => void }) {
  return (
    <tr class={chosen ? "chosen" : ""} data-run={run.key}>
      <td class="tick"><label><input type="checkbox" checked={chosen} onChange={toggle} /><span class="hidden">compare {run.name}</span></label></td>
      <td class="main">
        <a data-row href={link(["run", run.key])} class="name">{run.name}</a>
        <div class="muted small clip" title={run.folder}>{run.problem || run.title}</div>
      </td>
      <td data-label="status"><Status status={run.status} /></td>
      <td data-label="step" class="num">
        {number(run.step)}{run.steps !== null && <span class="muted">/{number(run.steps)}</span>}
        {run.steps !== null && run.status === "running" && <Progress part={run.step / run.steps} />}
      </td>
      <td class="curve"><Spark values={run.recent} label={`${run.metric} over steps`} /></td>
      <td data-label={run.metric || "reward"} class="num">{run.metric === "loss" && <span class="muted small">loss </span>}{fixed(run.value)}</td>
      <td data-label="held out" class="num"><Held point={run.before} />{run.after && <> → <b><Held point={run.after} /></b></>}</td>
      <td data-label="s/step" class="num">{number(run.step_seconds, 2)}</td>
      <td data-label="tok/s" class="num">{run.speed === null ? "–" : Math.round(run.speed).toLocaleString("en")}</td>
      <td data-label="ETA" class={run.eta === null ? "num empty" : "num"}>{seconds(run.eta)}</td>
      <td data-label="size" class="num">{size(run.size)}</td>
      <td data-label="changed" class="num muted">{ago(run.changed)}</td>
    </tr>
  );
}

export function Progress({ part }: { part: number }) {
  return <div class="progress" role="progressbar" aria-valuenow={Math.round(100 * part)}><i style={{ width: `${Math.min(100, 100 * part)}%` }} /></div>;
}
