// A prompt and its samples beside each other; one of them token by token; two of them compared.
import { useEffect } from "preact/hooks";
import { ask, useData } from "../api";
import { diff, type Piece } from "../diff";
import { number } from "../format";
import { Heat } from "../heat";
import { GROUP_PAGE, Reward, Waiting } from "../parts";
import type { GroupView, RunDetail, SampleView, TurnView } from "../records";
import { alter, altered, link } from "../router";

export function Group({ run, group, query }: { run: RunDetail; group: number; query: URLSearchParams }) {
  const key = run.summary.key;
  const state = useData(ask.group(key, group), [key]);
  const view = state.data;
  const chosen = view?.samples.find((sample) => String(sample.sample) === query.get("sample")) ?? view?.samples[0] ?? null;
  const other = view?.samples.find((sample) => String(sample.sample) === query.get("against")) ?? null;
  useEffect(() => {
    const move = (event: KeyboardEvent) => {
      const to = event.key === "[" ? view?.previous : event.key === "]" ? view?.next : null;
      if (to !== null && to !== undefined && !(event.target as HTMLElement).matches("input, select")) location.hash = GROUP_PAGE(key, to);
    };
    addEventListener("keydown", move);
    return () => removeEventListener("keydown", move);
  }, [view, key]);
  if (!view) return <Waiting state={state} what="Reading the group" />;
  return (
    <>
      <div class="bar group">
        <h2>Group {view.group} <span class="muted small">{view.prompt_id}</span></h2>
        <span class="muted small">{fate(view)} · asked at version {view.version}{view.suspended > 0 && ` · ${view.suspended} still being sampled`}</span>
        <span class="grow" />
        {view.previous !== null && <a class="button" href={GROUP_PAGE(key, view.previous)} aria-keyshortcuts="[">← {view.previous}</a>}
        {view.next !== null && <a class="button" href={GROUP_PAGE(key, view.next)} aria-keyshortcuts="]">{view.next} →</a>}
      </div>
      <section class="card">
        <Talk turns={view.messages} />
        <div class="turn"><span class="role">reference</span><pre>{view.reference}</pre></div>
        {view.context && <details class="small"><summary>context of the verifier</summary><pre>{view.context}</pre></details>}
      </section>
      <h3>Samples <span class="muted">{view.samples.length}</span></h3>
      <div class="beside">
        {view.samples.map((sample) => (
          <Card key={sample.sample} sample={sample} on={sample === chosen} against={sample === other} chosen={chosen} />
        ))}
      </div>
      {chosen && other && other !== chosen && <Difference a={chosen} b={other} />}
      {chosen && <One key={chosen.sample} run={key} group={group} sample={chosen} column={query.get("column") ?? "logprob"} />}
    </>
  );
}

const fate = (view: GroupView) => (view.fate ? `${view.fate} at step ${view.step}${view.reason && `: ${view.reason}`}` : "pending");
const called = (sample: SampleView) => (sample.sample < 0 ? "greedy" : `sample ${sample.sample}`);

function Card({ sample, on, against, chosen }: { sample: SampleView; on: boolean; against: boolean; chosen: SampleView | null }) {
  return (
    <article class={`card small-card${on ? " chosen" : ""}${against ? " against" : ""}`}>
      <header>
        <a data-row href={altered({ sample: sample.sample, against: null })} aria-current={on ? "true" : undefined} class="name">{called(sample)}</a>
        <Reward value={sample.value} outcome={sample.outcome} />
        <span class="grow" />
        {!on && chosen && <button class="quiet lift" onClick={() => alter({ against: against ? null : sample.sample })} aria-pressed={against}>{against ? "comparing" : "compare"}</button>}
      </header>
      <pre class="answer">{sample.text || "(nothing)"}</pre>
      <div class="muted small facts">
        <span>{sample.length} tokens</span>{sample.turns > 1 && <span>{sample.turns} turns</span>}
        <span>{sample.finish === "length" ? "cut off" : sample.finish}</span>{sample.status !== "complete" && <span>{sample.status}</span>}
      </div>
    </article>
  );
}

function One({ run, group, sample, column }: { run: string; group: number; sample: SampleView; column: string }) {
  const state = useData(ask.tokens(run, group, sample.sample), [run]);
  const components = Object.entries(sample.components);
  return (
    <section class="card" aria-label={called(sample)}>
      <div class="bar"><h3>{called(sample)}</h3><Reward value={sample.value} outcome={sample.outcome} />
        <span class="muted small">versions {sample.versions.join(", ") || "–"}</span></div>
      {(components.length > 0 || sample.detail || sample.rewards.length > 0) && (
        <dl class="verdict">
          {components.map(([name, value]) => <div key={name}><dt>{name}</dt><dd>{number(value)}</dd></div>)}
          {sample.rewards.length > 0 && <div><dt>rewards of turns</dt><dd>{sample.rewards.map((value) => number(value)).join(", ")}</dd></div>}
          {sample.detail && <div class="long"><dt>{sample.outcome === "error" ? "error" : "verifier"}</dt><dd><pre class={sample.outcome === "error" ? "warn-text" : ""}>{sample.detail}</pre></dd></div>}
        </dl>
      )}
      {sample.transcript.length > 0 && <><h4>Transcript</h4><Talk turns={sample.transcript} /></>}
      {!state.data ? <Waiting state={state} what="Reading tokens" /> : state.data.chains.map((chain, i) => (
        <div key={i}>
          <h4>{state.data!.chains.length > 1 ? `Tokens of context ${i + 1}` : "Tokens"}</h4>
          <Heat chain={chain} column={column} onColumn={(name) => alter({ column: name })} readable={state.data!.readable} />
        </div>
      ))}
    </section>
  );
}

export function Talk({ turns }: { turns: TurnView[] }) {
  return (
    <>
      {turns.map((turn, i) => (
        <div key={i} class={`turn ${turn.role}`}>
          <span class="role">{turn.role}{turn.name && ` ${turn.name}`}</span>
          <div>{turn.pictures.map((picture, j) => <img key={j} class="picture" src={picture} alt="picture" />)}{turn.text && <pre>{turn.text}</pre>}{turn.calls.map((call, j) => <pre key={j} class="call">{call}</pre>)}</div>
        </div>
      ))}
    </>
  );
}

function Difference({ a, b }: { a: SampleView; b: SampleView }) {
  const [left, right] = diff(a.text, b.text);
  return (
    <section class="card" aria-label="difference">
      <div class="bar"><h3>{called(a)} against {called(b)}</h3><span class="grow" /><a class="button" href={altered({ against: null })}>Close</a></div>
      <div class="two"><Side name={called(a)} pieces={left} kind="gone" /><Side name={called(b)} pieces={right} kind="new" /></div>
    </section>
  );
}

function Side({ name, pieces, kind }: { name: string; pieces: Piece[]; kind: string }) {
  return (
    <div><span class="role">{name}</span>
      <pre class="answer">{pieces.map((piece, i) => (piece.kind === "same" ? <span key={i}>{piece.text}</span> : <mark key={i} class={kind}>{piece.text}</mark>))}</pre></div>
  );
}

export const groupLink = (run: string, group: number) => link(["run", run, "group", group]);
