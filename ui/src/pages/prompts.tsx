// Prompts over their visits.
import { ask, useData } from "../api";
import { fixed, number } from "../format";
import { Empty, Waiting } from "../parts";
import type { PromptHistory, RunDetail, Visit } from "../records";
import { alter, link } from "../router";

const KINDS: [string, string, string][] = [
  ["", "all", "every prompt that was asked and judged"],
  ["flipping", "flipping", "rose and fell, by a quarter or more each time"],
  ["dead", "dead", "asked twice or more, never a point"],
  ["learning", "learning", "in between"],
  ["mastered", "mastered", "all right at the last visit"],
];
const PAGE = 50;

export function Prompts({ run, query }: { run: RunDetail; query: URLSearchParams }) {
  const key = run.summary.key, kind = query.get("kind") ?? "", at = Number(query.get("at") ?? 0);
  const state = useData(ask.prompts(key, new URLSearchParams({ kind, at: String(at) }).toString()), [key]);
  if (!run.rollouts) return <Empty>This run has no rollouts, so no prompt was answered.</Empty>;
  if (!state.data) return <Waiting state={state} what="Reading prompts" />;
  const { rows, total, counts } = state.data;
  const all = Object.values(counts).reduce((a, b) => a + b, 0);
  return (
    <>
      <div class="bar tools">
        <div class="tabs" role="radiogroup" aria-label="Kinds of prompts">
          {KINDS.map(([name, title, hint]) => (
            <button key={name} role="radio" aria-checked={name === kind} class={name === kind ? "on" : ""} title={hint} onClick={() => alter({ kind: name, at: null })}>
              {title} <span class="muted">{number(name ? counts[name] ?? 0 : all)}</span>
            </button>
          ))}
        </div>
        <span class="grow" />
        {at > 0 && <button onClick={() => alter({ at: at - PAGE > 0 ? at - PAGE : null })}>← Back</button>}
        {at + PAGE < total && <button onClick={() => alter({ at: at + PAGE })}>More →</button>}
      </div>
      <p class="muted small">{KINDS.find(([name]) => name === kind)?.[2]}. A bar is a visit: its height is the mean score of the samples; most visited first.</p>
      {rows.length ? <ul class="samples">{rows.map((row) => <Row key={row.prompt_id} run={key} row={row} />)}</ul> : <Empty>No prompt is of this kind.</Empty>}
    </>
  );
}

function Row({ run, row }: { run: string; row: PromptHistory }) {
  const last = row.visits.at(-1)!;
  return (
    <li class="sample">
      <div class="body">
        <a data-row class="question" href={link(["run", run, "group", last.group])}>{row.question || row.prompt_id}</a>
        <div class="muted small facts"><span>{row.prompt_id}</span><span>{row.visits.length === 1 ? "one visit" : `${row.visits.length} visits`}</span><span class={`kind ${row.kind}`}>{row.kind}</span></div>
      </div>
      <div class="visits">
        {row.visits.slice(-24).map((visit) => <Bar key={visit.group} run={run} visit={visit} />)}
        <b>{fixed(last.rate, 2)}</b>
      </div>
    </li>
  );
}

function Bar({ run, visit }: { run: string; visit: Visit }) {
  const says = `${visit.step === null ? "pending" : `step ${visit.step}`}: ${fixed(visit.rate, 2)}`;
  return <a class="visit" href={link(["run", run, "group", visit.group])} title={says} aria-label={says}><i style={{ height: `${Math.max(6, 100 * Math.min(1, Math.max(0, visit.rate)))}%` }} class={visit.rate >= 1 ? "good" : visit.rate <= 0 ? "bad" : ""} /></a>;
}
