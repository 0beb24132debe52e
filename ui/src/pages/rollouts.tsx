// What was sampled: filters, and pages of it.
import { useEffect, useState } from "preact/hooks";
import { ask, get, useData } from "../api";
import { number } from "../format";
import { Choice, Empty, Field, GROUP_PAGE, Reward, Waiting } from "../parts";
import type { Brief, RolloutPage, RunDetail } from "../records";
import { alter } from "../router";

const FILTERS = ["step", "reward_min", "reward_max", "length_min", "length_max", "finish", "verdict", "fate", "prompt", "text", "order"];

export function Rollouts({ run, query }: { run: RunDetail; query: URLSearchParams }) {
  const key = run.summary.key;
  const wanted = new URLSearchParams();
  for (const name of [...FILTERS, "after"]) if (query.get(name)) wanted.set(name, query.get(name)!);
  const state = useData(ask.rollouts(key, wanted.toString()), [key]);
  const page = useSearched(key, wanted, state.data);
  if (!run.rollouts) return <Empty>This run has no rollouts{run.metrics.length ? ": nothing is sampled in its kind of training." : " yet."}</Empty>;
  const value = (name: string) => query.get(name) ?? "";
  const set = (name: string) => (text: string) => { if (text !== value(name)) alter({ [name]: text, after: null }); };
  const used = FILTERS.filter((name) => name !== "order" && name !== "text" && value(name)).length;
  const filtered = used > 0 || value("text") !== "";
  const wide = matchMedia("(min-width: 761px)").matches;
  return (
    <>
      <form class="filters card" onSubmit={(event) => event.preventDefault()}>
        <Field label="text" value={value("text")} onChange={set("text")} wide search placeholder="in prompt, answer or what the verifier said" />
        <details class="more" open={wide || undefined}><summary class="button">Filters{used > 0 && ` (${used})`}</summary><div class="fields">
        <Field label="step" type="number" value={value("step")} onChange={set("step")} />
        <div class="pair"><Field label="reward from" type="number" value={value("reward_min")} onChange={set("reward_min")} /><Field label="to" type="number" value={value("reward_max")} onChange={set("reward_max")} /></div>
        <div class="pair"><Field label="tokens from" type="number" value={value("length_min")} onChange={set("length_min")} /><Field label="to" type="number" value={value("length_max")} onChange={set("length_max")} /></div>
        <Field label="prompt" value={value("prompt")} onChange={set("prompt")} placeholder="its id" />
        <Choice label="finish" value={value("finish")} onChange={set("finish")} of={[["", "any"], ["stop", "stop"], ["length", "cut off"], ["abort", "aborted"]]} />
        <Choice label="judged" hint="Whether the verifier gave a score, or failed on this answer" value={value("verdict")} onChange={set("verdict")} of={[["", "any"], ["scored", "with a score"], ["error", "not judged: an error"]]} />
        <Choice label="trained on?" hint="What training did with the group of this answer" value={value("fate")} onChange={set("fate")} of={[["", "any"], ["trained", "yes"], ["dropped", "no: left out by a filter"], ["skipped", "no: given up, or too old"], ["pending", "not yet"]]} />
        <Choice label="order" value={value("order") || "newest"} onChange={set("order")} of={[["newest", "newest"], ["oldest", "oldest"], ["best", "best reward"], ["worst", "worst reward"], ["longest", "longest"], ["shortest", "shortest"]]} />
        </div></details>
        {filtered && <button type="button" onClick={() => alter({ ...Object.fromEntries(FILTERS.map((name) => [name, null])), after: null })}>Clear</button>}
      </form>
      {!page ? <Waiting state={state} what="Reading rollouts" /> : (
        <>
          <div class="bar">
            <span class="muted" role="status">{says(page, value("text"))}</span>
            <span class="grow" />
            {page.at > 0 && <button onClick={() => history.back()}>← Back</button>}
            {page.next && page.rows.length > 0 && <button onClick={() => alter({ after: page.next }, true)}>More →</button>}
          </div>
          {page.rows.length ? <ul class="samples">{page.rows.map((row) => <Item key={`${row.group}/${row.sample}`} run={key} row={row} />)}</ul>
            : !page.next && <Empty>Nothing passes these filters.</Empty>}
        </>
      )}
    </>
  );
}

function says(page: RolloutPage, text: string): string {
  if (!text) return `${number(page.at + (page.rows.length ? 1 : 0))}–${number(page.at + page.rows.length)} of ${number(page.total)}`;
  const all = page.searched >= page.total;
  return `${page.rows.length} found; ${all ? `all ${number(page.total)}` : `${number(page.searched)} of ${number(page.total)}`} looked through`;
}

/** A search comes in pieces: go on with the next until a page is full. */
function useSearched(run: string, wanted: URLSearchParams, first: RolloutPage | null): RolloutPage | null {
  const [page, setPage] = useState(first);
  const query = wanted.toString();
  useEffect(() => {
    setPage(first);
    if (!first || !wanted.get("text")) return;
    const stop = new AbortController();
    (async () => {
      let whole = first;
      while (whole.next && whole.rows.length < 50) {
        const piece = new URLSearchParams(query);
        piece.set("after", whole.next);
        const next: RolloutPage = await get(ask.rollouts(run, piece.toString()), stop.signal);
        whole = { ...next, at: first.at, rows: [...whole.rows, ...next.rows] };
        setPage(whole);
      }
    })().catch(() => undefined);
    return () => stop.abort();
  }, [first]);
  return page && first ? page : first;
}

export function Item({ run, row }: { run: string; row: Brief }) {
  return (
    <li class="sample">
      <div class="side">
        <Reward value={row.value} outcome={row.outcome} />
        <span class="muted small">{row.length} tok</span>
      </div>
      <div class="body">
        <a data-row href={GROUP_PAGE(run, row.group, row.sample)} class="question">{row.question || row.prompt_id}</a>
        <pre class="answer">{row.text || <span class="muted">(nothing)</span>}</pre>
        {row.reference && <div class="small reference"><span class="muted">reference</span> <span class="clip">{row.reference}</span></div>}
        {row.detail && <div class={`small ${row.outcome === "error" ? "warn-text" : "muted"}`}>{row.detail}</div>}
        <div class="muted small facts">
          <span>{row.step === null ? "pending" : `step ${row.step}`}</span><span>{row.prompt_id}</span>
          <span>{row.sample < 0 ? "greedy" : `sample ${row.sample}`}</span>
          <span>{row.finish === "length" ? "cut off" : row.finish}</span>
          {row.fate !== "trained" && row.fate && <span>{row.fate}{row.reason && `: ${row.reason}`}</span>}
          {row.status !== "complete" && <span>{row.status}</span>}
        </div>
      </div>
    </li>
  );
}
