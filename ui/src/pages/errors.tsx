// Answers that could not be judged, by reason.
import { ask, useData } from "../api";
import { number } from "../format";
import { Empty, Waiting } from "../parts";
import type { RunDetail } from "../records";
import { link } from "../router";
import { Item } from "./rollouts";

export function Errors({ run }: { run: RunDetail }) {
  const key = run.summary.key;
  const state = useData(ask.errors(key), [key]);
  if (!state.data) return <Waiting state={state} what="Reading verdicts" />;
  const { total, kinds } = state.data;
  if (!total) return <Empty>{run.rollouts ? "Every answer could be judged." : "This run has no rollouts to judge."}</Empty>;
  return (
    <>
      <div class="bar">
        <h2>{number(total)} answers could not be judged <span class="muted small">of {number(run.rollouts)}, for {kinds.length === 1 ? "one reason" : `${kinds.length} reasons`}</span></h2>
        <span class="grow" />
        <a class="button" href={link(["run", key, "rollouts"], { verdict: "error" })}>All of them</a>
      </div>
      {kinds.map((kind) => (
        <section key={kind.detail} class="card">
          <div class="bar"><span class="chip warn">{number(kind.count)}×</span><pre class="reason">{kind.detail || "(no reason given)"}</pre></div>
          <p class="muted small">{kind.first_step === null ? "in groups that are pending" : kind.first_step === kind.last_step ? `at step ${kind.first_step}` : `steps ${kind.first_step} to ${kind.last_step}`}; the last of them:</p>
          <ul class="samples inner">{kind.examples.map((row) => <Item key={`${row.group}/${row.sample}`} run={key} row={row} />)}</ul>
        </section>
      ))}
    </>
  );
}
