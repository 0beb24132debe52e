// All runs: searched, filtered and sorted; their tags and notes are written here.
import { useState } from "preact/hooks";
import { ask, send, useData } from "../api";
import { Spark } from "../chart";
import { ago, number, fixed, seconds, size } from "../format";
import { Choice, Empty, Field, Held, Status, Waiting } from "../parts";
import type { RunSummary } from "../records";
import { alter, link } from "../router";

const MOST = 6;
const STATUSES = ["running", "finished", "stopped", "crashed", "unreadable"];
const SORTS: Record<string, (run: RunSummary) => number | string | null> = {
  changed: (run) => run.changed, name: (run) => run.name, value: (run) => run.value, after: (run) => (run.after ?? run.before)?.mean ?? null,
  step: (run) => run.step, step_seconds: (run) => run.step_seconds, size: (run) => run.size,
};

export function Runs({ query }: { query: URLSearchParams }) {
  const state = useData(ask.runs());
  const [chosen, setChosen] = useState<string[]>([]);
  if (!state.data) return <Waiting state={state} what="Looking for runs" />;
  const all = state.data;
  if (!all.length) return <Empty>No runs here yet. Start one with <code>kitae train quickstart</code>; it will appear by itself.</Empty>;
  const value = (name: string) => query.get(name) ?? "";
  const set = (name: string) => (text: string) => alter({ [name]: text });
  const runs = sorted(all.filter((run) => passes(run, value)), value("sort") || "changed", value("order") === "up");
  const tags = [...new Set(all.flatMap((run) => run.tags))].sort();
  const toggle = (key: string) =>
    setChosen((old) => (old.includes(key) ? old.filter((other) => other !== key) : [...old, key].slice(-MOST)));
  return (
    <>
      <div class="bar">
        <h1>Runs <span class="muted">{runs.length === all.length ? all.length : `${runs.length} of ${all.length}`}</span></h1>
        <span class="grow" />
        {chosen.length >= 2
          ? <a class="button" href={link(["compare"], { runs: chosen.join(",") })}>Compare {chosen.length}</a>
          : <span class="muted small">Tick two or more to compare</span>}
      </div>
      <div class="bar list-tools">
        <Field label="search" value={value("q")} onChange={set("q")} wide search placeholder="name, recipe, model, tags, notes" />
        <Choice label="status" value={value("status")} onChange={set("status")} of={[["", "any"], ...STATUSES.filter((name) => all.some((run) => run.status === name)).map((name): [string, string] => [name, name])]} />
        {tags.length > 0 && <Choice label="tag" value={value("tag")} onChange={set("tag")} of={[["", "any"], ...tags.map((tag): [string, string] => [tag, tag])]} />}
        <Choice label="sort by" value={value("sort") || "changed"} onChange={set("sort")} of={[["changed", "last change"], ["name", "name"], ["value", "last reward"], ["after", "held out"], ["step", "step"], ["step_seconds", "time of a step"], ["size", "size"]]} />
        <Choice label="order" value={value("order")} onChange={set("order")} of={[["", "descending"], ["up", "ascending"]]} />
      </div>
      {!runs.length ? <Empty>No run passes these filters.</Empty> : <div class="card flush">
        <table class="rows">
          <thead>
            <tr>
              <th><span class="hidden">compare</span></th><th>run</th><th>status</th><th class="num">step</th><th>curve</th><th class="num">last reward</th>
              <th class="num">held out</th><th class="num">s/step</th><th class="num">tok/s</th><th class="num">ETA</th><th class="num">size</th><th class="num">changed</th>
            </tr>
          </thead>
          <tbody>{runs.map((run) => <Row key={run.key} run={run} chosen={chosen.includes(run.key)} toggle={() => toggle(run.key)} />)}</tbody>
        </table>
      </div>}
    </>
  );
}

function passes(run: RunSummary, value: (name: string) => string): boolean {
  const text = [run.name, run.title, run.note, ...run.tags].join(" ").toLowerCase();
  return value("q").toLowerCase().split(/\s+/).every((word) => text.includes(word))
    && (!value("status") || run.status === value("status")) && (!value("tag") || run.tags.includes(value("tag")));
}

/** What is not known comes last, in both orders. */
function sorted(runs: RunSummary[], by: string, up: boolean): RunSummary[] {
  const key = SORTS[by] ?? SORTS.changed!;
  return [...runs].sort((a, b) => {
    const [x, y] = [key(a), key(b)];
    if (x === null || y === null) return (x === null ? 1 : 0) - (y === null ? 1 : 0);
    return (up ? 1 : -1) * (x < y ? -1 : x > y ? 1 : 0);
  });
}

/** Tags as chips, a note below them, and a form for both. */
export function Notes({ run }: { run: RunSummary }) {
  const [open, setOpen] = useState(false);
  const [problem, setProblem] = useState("");
  const save = async (event: SubmitEvent) => {
    event.preventDefault();
    const form = new FormData(event.currentTarget as HTMLFormElement);
    const tags = String(form.get("tags")).split(",").map((tag) => tag.trim()).filter(Boolean);
    try {
      await send(`/api/runs/${encodeURIComponent(run.key)}/notes`, { tags, note: String(form.get("note")) });
      setOpen(false);
      setProblem("");
    } catch (error) { setProblem((error as Error).message); }
  };
  return (
    <div class="notes">
      {!open && <>
        {run.tags.map((tag) => <span key={tag} class="chip half">{tag}</span>)}
        {run.note && <p class="note">{run.note}</p>}
        <button class="quiet" onClick={() => setOpen(true)}>{run.tags.length || run.note ? "edit notes" : "add tags or a note"}</button>
      </>}
      {open && <form class="card" onSubmit={save}>
        <label class="field"><span>tags, with commas between them</span><input name="tags" defaultValue={run.tags.join(", ")} /></label>
        <label class="field"><span>note</span><textarea name="note" rows={3}>{run.note}</textarea></label>
        <div class="bar"><button type="submit">Save</button><button type="button" class="quiet" onClick={() => setOpen(false)}>Cancel</button>
          <span class="muted small">kept in notes.json of the run's folder</span></div>
        {problem && <p class="notice bad" role="alert">{problem}</p>}
      </form>}
    </div>
  );
}

function Row({ run, chosen, toggle }: { run: RunSummary; chosen: boolean; toggle: () => void }) {
  return (
    <tr class={chosen ? "chosen" : ""} data-run={run.key}>
      <td class="tick"><label><input type="checkbox" checked={chosen} onChange={toggle} /><span class="hidden">compare {run.name}</span></label></td>
      <td class="main">
        <a data-row href={link(["run", run.key])} class="name">{run.name}</a>
        <div class="muted small clip" title={run.folder}>{run.problem || run.title}</div>
        {(run.tags.length > 0 || run.note) && <div class="small clip tags">{run.tags.map((tag) => <span key={tag} class="chip half">{tag}</span>)} <span class="muted">{run.note}</span></div>}
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
