// One run: how it stands, its curves, and where the seconds of a step went.
import { useMemo, useState } from "preact/hooks";
import { ask, useData } from "../api";
import { Chart, STEPS, type Axis, type Line, type Range } from "../chart";
import { fixed, number, seconds, size } from "../format";
import { Empty, Held, Stat, Waiting } from "../parts";
import type { RunDetail, Series } from "../records";
import { alter } from "../router";
import { SERIES } from "../theme";
import { Progress } from "./runs";

const USUAL = ["reward", "loss", "length", "entropy", "grad_norm", "logp_gap", "kl_k3", "accuracy", "margin", "groups_with_signal", "clip_fraction", "staleness",
  "truncated", "error_share", "teacher_kl", "teacher_divergence", "value_loss", "ess"];
const MOST = 6;

export function Curves({ run, query, most = MOST, head = true }: { run: RunDetail; query: URLSearchParams; most?: number; head?: boolean }) {
  const chosen = useMemo(() => chosenMetrics(run, query.get("metrics"), most), [run.metrics.join(), query.get("metrics")]);
  const smoothing = Number(query.get("smooth") ?? 0);
  const [zoom, setZoom] = useState<Range | null>(null);
  const key = run.summary.key;
  const over = query.get("over") ?? "";
  const state = useData(ask.series(key, [...new Set([...chosen, ...run.phases, ...columnsOf(over, run.metrics)])]), [key]);
  const series = state.data;
  const axis = useMemo(() => axisOf(over, series ? { [key]: series } : {}), [over, series]);
  const choose = (names: string[]) => alter({ metrics: names.join(",") });
  return (
    <>
      {head && <Head run={run} />}
      {!run.metrics.length ? <Empty>No step is finished yet; curves appear with the first one.</Empty> : <>
        <div class="bar tools">
          <Picker all={[...run.metrics, ...run.evaluations.filter((name) => !/_(low|high)$/.test(name)).map((name) => `eval/${name}`)]} chosen={chosen} onChange={choose} />
          <label class="field inline"><span>smoothing</span>
            <input type="range" min="0" max="0.98" step="0.02" value={smoothing} onInput={(event) => alter({ smooth: event.currentTarget.value === "0" ? null : event.currentTarget.value })} />
            <output>{smoothing ? smoothing.toFixed(2) : "off"}</output>
          </label>
          <Over value={over} metrics={run.metrics} clear={() => setZoom(null)} />
          <span class="grow" />
          {zoom ? <button onClick={() => setZoom(null)}>Whole run</button> : <span class="muted small">Drag over a curve to zoom all of them</span>}
        </div>
        {!series ? <Waiting state={state} what="Reading metrics" /> : (
          <div class="charts">
            {chosen.map((name) => (
              <Chart key={name} title={name} lines={linesOf(name, series)} axis={axis} smoothing={smoothing} zoom={zoom} onZoom={setZoom}
                onRemove={() => choose(chosen.filter((other) => other !== name))} />
            ))}
            {run.phases.length > 0 && !over && <Phases names={run.phases} series={series} zoom={zoom} onZoom={setZoom} />}
          </div>
        )}
      </>}
    </>
  );
}

function Head({ run: { summary: s, rollouts } }: { run: RunDetail }) {
  return (
    <dl class="stats">
      <Stat name="step">
        {number(s.step)}{s.steps !== null && <span class="muted"> / {number(s.steps)}</span>}
        {s.steps !== null && <Progress part={s.step / s.steps} />}
      </Stat>
      <Stat name={s.metric || "reward"}>{fixed(s.value)}</Stat>
      <Stat name="held out" hint="before → after, with the 95 % interval">
        {s.before ? <><Held point={s.before} />{s.after && <> → <Held point={s.after} /></>}</> : "–"}
        {(s.after ?? s.before) && <small class="muted">{fixed((s.after ?? s.before)!.low, 2)} – {fixed((s.after ?? s.before)!.high, 2)}</small>}
      </Stat>
      <Stat name="time of a step">{seconds(s.step_seconds)}</Stat>
      <Stat name="tokens per second">{s.speed === null ? "–" : Math.round(s.speed).toLocaleString("en")}</Stat>
      {s.eta !== null && <Stat name="time left">{seconds(s.eta)}</Stat>}
      {rollouts > 0 && <Stat name="rollouts">{number(rollouts)}</Stat>}
      <Stat name="on disk">{size(s.size)}</Stat>
    </dl>
  );
}

function chosenMetrics(run: RunDetail, text: string | null, most: number): string[] {
  if (text !== null) return text.split(",").filter(Boolean);
  const held = run.metrics.includes("reward") || !run.evaluations.includes("avg") ? [] : ["eval/avg"];
  const usual = [...held, ...USUAL.filter((name) => run.metrics.includes(name))];
  return (usual.length ? usual : run.metrics).slice(0, most);
}

/** A metric of steps with the held-out points that belong to it, or one of the evaluations. */
function linesOf(name: string, series: Series): Line[] {
  const own = name.startsWith("eval/") ? name.slice(5) : "";
  if (own) return points(own, own, series, SERIES[1]!);
  const steps: Line[] = [{ name, steps: series.steps, values: series.columns[name] ?? [], colour: SERIES[0]! }];
  if (name !== "reward" && name !== "loss") return steps;
  const suites = Object.keys(series.evaluations).filter((column) => column.endsWith("/avg")).map((column) => column.slice(0, -4));
  const others = suites.flatMap((suite, i) => points(suite, `${suite}/avg`, series, SERIES[(i + 2) % SERIES.length]!));
  return [...steps, ...points("held out", name === "reward" ? "avg" : name, series, SERIES[1]!), ...others];
}

function points(title: string, name: string, { evaluation_steps, evaluations }: Series, colour: string): Line[] {
  const values = evaluations[name];
  if (!values) return [];
  const low = evaluations[`${name}_low`], high = evaluations[`${name}_high`];
  return [{ name: title, steps: evaluation_steps, values, colour, points: true, ...(low && high ? { low, high } : {}) }];
}

function Phases({ names, series, zoom, onZoom }: { names: string[]; series: Series; zoom: Range | null; onZoom: (range: Range | null) => void }) {
  const used = names.filter((name) => series.columns[name]?.some((value) => (value ?? 0) > 0));
  if (!used.length) return null;
  const lines = used.map((name, i) => ({ name: name.replace(/_seconds$/, ""), steps: series.steps, values: series.columns[name]!, colour: SERIES[i % SERIES.length]! }));
  return <div class="wide"><Chart title="seconds of a step, by phase" lines={lines} stacked zoom={zoom} onZoom={onZoom} height={210} /></div>;
}

/** What may stand below the curves beside steps, and the columns that add up to it. */
const OVERS: Record<string, { name: string; columns: string[]; part: number }> = {
  time: { name: "minutes", columns: ["step_seconds"], part: 60 },
  tokens: { name: "million tokens", columns: ["generated_tokens", "loss_tokens"], part: 1e6 },
};

export const columnsOf = (over: string, metrics: string[]) => OVERS[over]?.columns.filter((name) => metrics.includes(name)).slice(0, 1) ?? [];

/** Steps, or what all steps up to one took together; that of a step without numbers is that of the one before. */
export function axisOf(over: string, all: Record<string, Series>): Axis {
  const asked = OVERS[over];
  if (!asked) return STEPS;
  const sums = Object.fromEntries(Object.entries(all).map(([run, series]) => {
    const column = asked.columns.map((name) => series.columns[name]).find(Boolean) ?? [];
    let sum = 0;
    return [run, series.steps.map((step, i): [number, number] => [step, (sum += column[i] ?? 0) / asked.part])];
  }));
  const of = (line: Line, step: number) => (sums[line.run ?? ""] ?? Object.values(sums)[0] ?? []).reduce((last, [at, sum]) => (at <= step ? sum : last), 0);
  return { name: asked.name, of };
}

export function Over({ value, metrics, clear }: { value: string; metrics: string[]; clear: () => void }) {
  const known = Object.keys(OVERS).filter((name) => columnsOf(name, metrics).length);
  if (!known.length) return null;
  return (
    <label class="field inline"><span>over</span>
      <select value={value} onChange={(event) => { clear(); alter({ over: event.currentTarget.value || null }); }}>
        {["", ...known].map((name) => <option key={name} value={name} selected={name === value}>{name || "steps"}</option>)}
      </select>
    </label>
  );
}

/** Which metrics are drawn: a list with a filter. */
export function Picker({ all, chosen, onChange }: { all: string[]; chosen: string[]; onChange: (names: string[]) => void }) {
  const [filter, setFilter] = useState("");
  const shown = all.filter((name) => name.toLowerCase().includes(filter.toLowerCase()));
  return (
    <details class="picker">
      <summary class="button">Metrics <span class="muted">{chosen.length} of {all.length}</span></summary>
      <div class="menu card">
        <input type="search" data-search placeholder="filter" aria-label="Filter metrics" value={filter} onInput={(event) => setFilter(event.currentTarget.value)} />
        <ul>
          {shown.map((name) => (
            <li key={name}><label>
              <input type="checkbox" checked={chosen.includes(name)} onChange={(event) => onChange(event.currentTarget.checked ? [...chosen, name] : chosen.filter((other) => other !== name))} />
              {name}
            </label></li>
          ))}
        </ul>
      </div>
    </details>
  );
}
