// Two to six runs over each other.
import type { ComponentChildren } from "preact";
import { useEffect, useMemo, useState } from "preact/hooks";
import { ask, get, useData } from "../api";
import { Chart, type Column, type Line, type Range } from "../chart";
import { fixed, number, seconds, setting, signed } from "../format";
import { Empty, Held, Status, Waiting } from "../parts";
import type { RunComparison, RunSummary, Series } from "../records";
import { alter, link } from "../router";
import { SERIES } from "../theme";
import { Over, Picker, axisOf, columnsOf } from "./curves";

const USUAL = ["reward", "loss", "length", "entropy", "step_seconds"];

export function Compare({ query }: { query: URLSearchParams }) {
  const keys = (query.get("runs") ?? "").split(",").filter(Boolean);
  const list = useData(ask.runs());
  const enough = keys.length >= 2 && keys.length <= 6;
  const state = useData(enough ? ask.compare(keys) : null, keys);
  return (
    <>
      <h1>Compare</h1>
      {list.data && <Choose all={list.data} chosen={keys} />}
      {!enough ? <Empty>Choose two to six runs.</Empty> : !state.data ? <Waiting state={state} what="Reading the runs" /> : <Found found={state.data} query={query} />}
    </>
  );
}

function Choose({ all, chosen }: { all: RunSummary[]; chosen: string[] }) {
  const toggle = (key: string) => alter({ runs: (chosen.includes(key) ? chosen.filter((other) => other !== key) : [...chosen, key]).join(",") });
  return (
    <div class="choose" role="group" aria-label="Runs to compare">
      {all.map((run) => {
        const i = chosen.indexOf(run.key);
        return (
          <button key={run.key} class={i >= 0 ? "on" : ""} aria-pressed={i >= 0} disabled={i < 0 && chosen.length >= 6} onClick={() => toggle(run.key)}>
            {i >= 0 && <i class="swatch" style={{ background: `var(--${SERIES[i]})` }} />}{run.name}
          </button>
        );
      })}
    </div>
  );
}

function Found({ found, query }: { found: RunComparison; query: URLSearchParams }) {
  const chosen = query.get("metrics")?.split(",").filter(Boolean) ?? USUAL.filter((name) => found.metrics.includes(name)).slice(0, 4);
  const smoothing = Number(query.get("smooth") ?? 0);
  const [zoom, setZoom] = useState<Range | null>(null);
  const over = query.get("over") ?? "";
  const series = useAll(found.runs.map((run) => run.key), [...new Set([...chosen, ...columnsOf(over, found.metrics)])], found);
  const axis = useMemo(() => axisOf(over, series), [over, series]);
  const seeded = new Set(found.runs.map((run) => run.alike)).size < found.runs.length;
  const together = seeded && query.get("seeds") === "together";
  const each = (name: string): Line[] => found.runs.map((run, i) => ({ name: run.name, run: run.key, steps: series[run.key]?.steps ?? [], values: series[run.key]?.columns[name] ?? [], colour: SERIES[i]! }));
  const lines = (name: string) => (together ? ofSeeds(found.runs, each(name)) : each(name));
  return (
    <>
      <div class="bar tools">
        <Picker all={found.metrics} chosen={chosen} onChange={(names) => alter({ metrics: names.join(",") })} />
        <label class="field inline"><span>smoothing</span>
          <input type="range" min="0" max="0.98" step="0.02" value={smoothing} onInput={(event) => alter({ smooth: event.currentTarget.value === "0" ? null : event.currentTarget.value })} />
          <output>{smoothing ? smoothing.toFixed(2) : "off"}</output></label>
        <Over value={over} metrics={found.metrics} clear={() => setZoom(null)} />
        {seeded && <label class="field inline" title="Runs that differ in nothing but their seed become one curve: the mean, with one standard deviation to each side">
          <input type="checkbox" checked={together} onChange={() => alter({ seeds: together ? null : "together" })} /><span>mean and spread of seeds</span></label>}
        <span class="grow" />
        {zoom && <button onClick={() => setZoom(null)}>Whole runs</button>}
      </div>
      <div class="charts">{chosen.map((name) => <Chart key={name} title={name} lines={lines(name)} axis={axis} smoothing={smoothing} zoom={zoom} onZoom={setZoom} />)}</div>
      <h3>Results</h3>
      <Results found={found} />
      <h3>Held-out prompts of both</h3>
      <HeldOutPairs found={found} />
      <h3>Training prompts of both</h3>
      <Pairs found={found} />
      <h3>Settings that differ <span class="muted">{found.settings.length}</span></h3>
      {found.settings.length ? (
        <div class="card flush scroll-x" tabIndex={0}>
          <table class="plain settings">
            <thead><tr><th>setting</th>{found.runs.map((run) => <th key={run.key}>{run.name}</th>)}</tr></thead>
            <tbody>{found.settings.map((row) => <tr key={row.key}><td>{row.key}</td>{row.values.map((value, i) => <td key={i} class={setting(value) === setting(row.values[0]) ? "" : "differs"}>{setting(value)}</td>)}</tr>)}</tbody>
          </table>
        </div>
      ) : <Empty>All settings are the same.</Empty>}
    </>
  );
}

/** One line for all runs that differ in their seed alone: at each step the mean of those that have it, and one standard
 * deviation to each side of it. Over time or tokens the first run of a group says where its steps are. */
function ofSeeds(runs: RunSummary[], lines: Line[]): Line[] {
  return [...new Set(runs.map((run) => run.alike))].map((alike): Line => {
    const own = lines.filter((_, i) => runs[i]!.alike === alike);
    const first = own[0]!;
    if (own.length === 1) return first;
    const steps = [...new Set(own.flatMap((line) => line.steps))].sort((a, b) => a - b);
    const found = steps.map((step) => own.flatMap((line) => { const value = line.values[line.steps.indexOf(step)]; return value == null ? [] : [value]; }));
    const values: Column = found.map((all) => (all.length ? all.reduce((a, b) => a + b, 0) / all.length : null));
    const reach = found.map((all, i) => (all.length < 2 ? null : Math.sqrt(all.reduce((sum, value) => sum + (value - values[i]!) ** 2, 0) / (all.length - 1))));
    const end = (sign: number): Column => values.map((value, i) => (value === null || reach[i] === null ? null : value + sign * reach[i]!));
    return { ...first, name: `${own.length} seeds: ${own.map((line) => line.name).join(", ")}`, steps, values, low: end(-1), high: end(1) };
  });
}

function Results({ found }: { found: RunComparison }) {
  const rows: [string, (run: RunSummary) => ComponentChildren][] = [
    ["status", (run) => <Status status={run.status} />],
    ["step", (run) => `${number(run.step)}${run.steps === null ? "" : ` / ${number(run.steps)}`}`],
    ["last reward or loss", (run) => fixed(run.value)],
    ["held out before", (run) => <Interval run={run} which="before" />],
    ["held out after", (run) => <Interval run={run} which="after" />],
    ["time of a step", (run) => seconds(run.step_seconds)],
    ["tokens per second", (run) => number(run.speed)],
  ];
  return (
    <div class="card flush scroll-x" tabIndex={0}>
      <table class="plain">
        <thead><tr><th><span class="hidden">result</span></th>{found.runs.map((run, i) => <th key={run.key}><i class="swatch" style={{ background: `var(--${SERIES[i]})` }} /><a href={link(["run", run.key])}>{run.name}</a></th>)}</tr></thead>
        <tbody>{rows.map(([name, cell]) => <tr key={name}><td>{name}</td>{found.runs.map((run) => <td key={run.key}>{cell(run)}</td>)}</tr>)}</tbody>
      </table>
    </div>
  );
}

function Interval({ run, which }: { run: RunSummary; which: "before" | "after" }) {
  const point = run[which];
  return <><Held point={point} />{point?.low != null && <span class="muted small"> [{fixed(point.low, 2)}, {fixed(point.high, 2)}]</span>}</>;
}

function HeldOutPairs({ found }: { found: RunComparison }) {
  const [first] = found.runs;
  const name = (key: string) => found.runs.find((run) => run.key === key)?.name;
  return (
    <div class="card flush scroll-x" tabIndex={0} data-pairs="held-out">
      <table class="plain">
        <thead><tr><th>against {first!.name}</th><th>prompts</th><th>{first!.name}</th><th>this run</th><th>difference, 95 % interval</th><th>p</th></tr></thead>
        <tbody>{found.held_out.map((pair) => pair.difference === null || pair.low === null || pair.high === null ? (
          <tr key={pair.key}><td>{name(pair.key)}</td><td colSpan={5} class="muted why">{pair.reason}</td></tr>
        ) : (
          <tr key={pair.key}><td>{name(pair.key)}</td><td>{number(pair.prompts)}</td><td>{fixed(pair.first)}</td><td>{fixed(pair.second)}</td>
            <td><b class={pair.low > 0 || pair.high < 0 ? "" : "muted"}>{signed(pair.difference)}</b> <span class="muted">[{signed(pair.low)}, {signed(pair.high)}]</span></td>
            <td>{pair.p! < 0.001 ? "<0.001" : fixed(pair.p)}</td></tr>
        ))}</tbody>
      </table>
      <p class="muted small pad">Last evaluations, prompt by prompt. p: the chance of a difference at least so large, were both runs equally good.</p>
    </div>
  );
}

function Pairs({ found }: { found: RunComparison }) {
  const [first] = found.runs;
  if (!found.pairings.length) return <Empty>These runs have no prompts in common that were judged.</Empty>;
  return (
    <div class="card flush scroll-x" tabIndex={0}>
      <table class="plain">
        <thead><tr><th>against {first!.name}</th><th>prompts</th><th>{first!.name}</th><th>this run</th><th>difference, 95 % interval</th></tr></thead>
        <tbody>{found.pairings.map((pair) => {
          const sure = pair.low > 0 ? "good-text" : pair.high < 0 ? "bad-text" : "muted";
          return <tr key={pair.key}><td>{found.runs.find((run) => run.key === pair.key)?.name}</td><td>{number(pair.prompts)}</td><td>{fixed(pair.first)}</td><td>{fixed(pair.second)}</td>
            <td><b class={sure}>{signed(pair.difference)}</b> <span class="muted">[{signed(pair.low)}, {signed(pair.high)}]</span></td></tr>;
        })}</tbody>
      </table>
      <p class="muted small pad">Training prompts, each by the mean score of its last visit: how a run did while it learnt, not on held-out data.</p>
    </div>
  );
}

function useAll(keys: string[], names: string[], again: unknown): Record<string, Series> {
  const [found, setFound] = useState<Record<string, Series>>({});
  useEffect(() => {
    const stop = new AbortController();
    Promise.all(keys.map((key) => get<Series>(ask.series(key, names), stop.signal))).then(
      (all) => setFound(Object.fromEntries(all.map((series, i) => [keys[i]!, series]))),
      () => undefined,
    );
    return () => stop.abort();
  }, [keys.join(), names.join(), again]);
  return found;
}
