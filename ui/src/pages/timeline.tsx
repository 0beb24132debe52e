// Who worked, who waited, and how old the tokens were.
import { useState } from "preact/hooks";
import { ask, useData } from "../api";
import { Chart, type Range } from "../chart";
import { Empty, Waiting } from "../parts";
import type { RunDetail, LaneView, LaneSpan } from "../records";
import { alter } from "../router";
import { SERIES } from "../theme";

const COLOURS: Record<string, string> = { generate: "s2", verify: "s3", train: "s1", sync: "s6", save: "s4", evaluate: "s5" };
const TALL = 132; // pixels that a part with many lanes may take

export function Timeline({ run, query }: { run: RunDetail; query: URLSearchParams }) {
  const key = run.summary.key, steps = Number(query.get("steps") ?? 8), last = query.get("last") ?? "";
  const state = useData(ask.timeline(key, new URLSearchParams({ steps: String(steps), last }).toString()), [key]);
  const found = state.data;
  return (
    <>
      {!found ? <Waiting state={state} what="Reading the timeline" /> : !found.spans.length ? <Empty>This run has no timeline yet.</Empty> : (
        <>
          <div class="bar tools">
            <h2>Steps {found.first}–{found.last} <span class="muted small">of {found.of}; {(found.end - found.start).toFixed(1)} s</span></h2>
            <span class="grow" />
            <label class="field inline"><span>steps</span>
              <select value={String(steps)} onChange={(event) => alter({ steps: event.currentTarget.value })}>
                {[2, 4, 8, 16, 32].map((n) => <option key={n} value={n} selected={n === steps}>{n}</option>)}
              </select></label>
            <button disabled={found.first <= 1} onClick={() => alter({ last: Math.max(1, found.last - steps) })}>← Earlier</button>
            <button disabled={found.last >= found.of} onClick={() => alter({ last: found.last + steps >= found.of ? null : found.last + steps })}>Later →</button>
          </div>
          <Lanes found={found} />
          {found.left_out > 0 && <p class="muted small">{found.left_out} spans are not drawn; choose fewer steps to see all.</p>}
        </>
      )}
      <Idle run={run} />
    </>
  );
}

export function Lanes({ found }: { found: LaneView }) {
  const [at, setAt] = useState<LaneSpan | null>(null);
  const parts = Object.keys(found.lanes);
  return (
    <section class="card lanes" aria-label="Who worked when">
      {parts.map((part) => {
        const count = found.lanes[part]!, height = Math.max(2, Math.min(16, TALL / count)), busy = found.busy[part];
        const colour = `var(--${COLOURS[part] ?? "s7"})`;
        return (
          <div class="lane" key={part}>
            <div class="lane-name"><span>{part}</span>{busy !== undefined && <b>{Math.round(100 * busy)} %</b>}</div>
            <svg width="100%" height={Math.max(16, count * height)} role="img" aria-label={`${part}: at work ${Math.round(100 * (busy ?? 0))} % of the time`}>
              {found.spans.filter((span) => span.part === part).map((span, i) => (
                <rect key={i} x={`${place(span.start, found)}%`} width={`${Math.max(0.12, place(span.end, found) - place(span.start, found))}%`} y={span.lane * height + 0.5} height={Math.max(1.5, height - 1)}
                  rx={height > 6 ? 2 : 0} fill={colour} fill-opacity={at === span ? 1 : 0.82} onPointerEnter={() => setAt(span)} />
              ))}
            </svg>
          </div>
        );
      })}
      <div class="lane axis"><div class="lane-name" /><div class="ticks">{[0, 0.25, 0.5, 0.75, 1].map((part) => <span key={part}>{(found.start + part * (found.end - found.start)).toFixed(0)} s</span>)}</div></div>
      <p class="small muted" role="status">{at ? `${at.part}, step ${at.step}: ${at.start.toFixed(2)} – ${at.end.toFixed(2)} s (${(at.end - at.start).toFixed(2)} s)` : "Percentages: the share of this time in which a part was at work. Point at a bar for its times."}</p>
    </section>
  );
}

const place = (time: number, { start, end }: LaneView) => (100 * (time - start)) / (end - start || 1);

export function Idle({ run }: { run: RunDetail }) {
  const ages = run.metrics.filter((name) => /^staleness\/\d+$/.test(name)).sort((a, b) => Number(a.slice(10)) - Number(b.slice(10)));
  const idle = ["trainer_idle", "engine_idle"].filter((name) => run.metrics.includes(name));
  const stale = ["staleness", "staleness_max"].filter((name) => run.metrics.includes(name));
  const state = useData(run.metrics.length ? ask.series(run.summary.key, [...idle, ...stale, ...ages]) : null, [run.summary.key]);
  const [zoom, setZoom] = useState<Range | null>(null);
  const series = state.data;
  if (!series) return null;
  const lines = (names: string[], title: (name: string) => string) =>
    names.map((name, i) => ({ name: title(name), steps: series.steps, values: series.columns[name] ?? [], colour: SERIES[i]! }));
  return (
    <div class="charts">
      {idle.length > 0 && <Chart title="share of a step spent waiting" lines={lines(idle, (name) => name.replace("_idle", ""))} zoom={zoom} onZoom={setZoom} />}
      {stale.length > 0 && <Chart title="staleness, in versions" lines={lines(stale, (name) => (name === "staleness" ? "mean" : "oldest"))} zoom={zoom} onZoom={setZoom} />}
      {ages.length > 0 && <Chart title="share of tokens by age" lines={lines(ages, (name) => `${name.slice(10)} old`)} stacked zoom={zoom} onZoom={setZoom} />}
    </div>
  );
}
