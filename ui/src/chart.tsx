// Curves: uPlot behind a component. Charts of a page share the cursor and, through `zoom`, the range of steps.
import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import uPlot from "uplot";
import "uplot/dist/uPlot.min.css";
import { fixed, number } from "./format";
import { colour, useTheme } from "./theme";

export type Column = (number | null)[];
export interface Range { min: number; max: number }

export interface Line {
  name: string;
  steps: number[];
  values: Column;
  colour: string;
  /** Points alone, with intervals where these are given. */
  points?: boolean;
  low?: Column;
  high?: Column;
  /** Which run it is of, where places of steps differ from run to run. */
  run?: string;
}

/** What the curves are drawn over: `of` gives the place of a step; without it, steps themselves. */
export interface Axis { name: string; of?: (line: Line, step: number) => number }
export const STEPS: Axis = { name: "step" };

interface Props {
  title: string;
  axis?: Axis;
  lines: Line[];
  smoothing?: number;
  stacked?: boolean;
  zoom: Range | null;
  onZoom: (range: Range | null) => void;
  onRemove?: () => void;
  height?: number;
}

export function Chart(props: Props) {
  const { title, smoothing = 0, stacked = false, zoom, onZoom, height = 190, axis = STEPS } = props;
  const lines = useMemo(() => placed(props.lines, axis), [props.lines, axis]);
  const box = useRef<HTMLDivElement>(null);
  const plot = useRef<uPlot | null>(null);
  const [at, setAt] = useState<number | null>(null);
  const [asTable, setAsTable] = useState(false);
  const { dark } = useTheme();
  const zoomed = useRef(onZoom);
  zoomed.current = onZoom;
  const table = useMemo(() => joined(lines), [lines]);
  const data = useMemo(() => drawn(table, lines, smoothing, stacked), [table, smoothing, stacked]);
  const shape = lines.map((line) => `${line.name}|${line.colour}|${line.points}`).join() + stacked + (smoothing > 0) + dark + height + axis.name;

  useEffect(() => {
    if (asTable || !box.current) return;
    const made = new uPlot(
      options(box.current.clientWidth, height, lines, smoothing > 0, stacked, () => intervals.current, (range) => zoomed.current(range), setAt, !axis.of),
      data, box.current);
    plot.current = made;
    const watch = new ResizeObserver(() => box.current && made.setSize({ width: box.current.clientWidth, height }));
    watch.observe(box.current);
    return () => { watch.disconnect(); made.destroy(); plot.current = null; };
  }, [shape, asTable]);

  const intervals = useRef<Interval[]>([]);
  intervals.current = useMemo(() => bars(lines), [lines]);
  useEffect(() => {
    plot.current?.batch(() => {
      plot.current?.setData(data, false);
      plot.current?.setScale("x", zoom ?? span(table.steps, stacked ? 0.5 : 0));
    });
  }, [data, zoom, shape, asTable]);

  const row = at ?? lastRow(table);
  return (
    <section class="card chart" aria-label={`${title} over ${axis.name}`} data-chart={title}>
      <header>
        <h3>{title}</h3>
        <div class={`legend${lines.length > 1 ? " several" : ""}`}>
          {lines.map((line, i) => {
            const value = row === null ? null : near(table.columns[i]!, row, at === null);
            return value === null && lines.length > 1 && at !== null ? null : (
              <span key={line.name}>
                {lines.length > 1 && <i class="swatch" style={{ background: `var(--${line.colour})` }} />}
                {lines.length > 1 && `${line.name} `}<b>{stacked ? fixed(value, 2) : number(value)}</b>
              </span>
            );
          })}
          {at !== null && row !== null && <span class="muted">{axis.name} {number(table.steps[row])}</span>}
        </div>
        <button class="quiet" aria-pressed={asTable} onClick={() => setAsTable(!asTable)} title="Show the numbers">{asTable ? "curve" : "table"}</button>
        <button class="quiet" onClick={() => download(title, axis, lines, table)} title="Download the numbers as CSV" aria-label={`Download ${title}`}>csv</button>
        {props.onRemove && <button class="quiet" onClick={props.onRemove} aria-label={`Remove ${title}`} title="Remove">×</button>}
      </header>
      {asTable ? <Numbers table={table} lines={lines} axis={axis} /> : <div class="plot" ref={box} style={{ height: `${height}px` }} />}
    </section>
  );
}

function Numbers({ table, lines, axis }: { table: Joined; lines: Line[]; axis: Axis }) {
  return (
    <div class="scroll" tabIndex={0}>
      <table class="plain">
        <thead><tr><th>{axis.name}</th>{lines.map((line) => <th key={line.name}>{line.name}</th>)}</tr></thead>
        <tbody>
          {table.steps.map((step, i) => (
            <tr key={step}><td>{step}</td>{table.columns.map((column, j) => <td key={j} data-value={column[i] ?? ""}>{number(column[i], 6)}</td>)}</tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

/** Lines at the places of their steps. */
function placed(lines: Line[], axis: Axis): Line[] {
  const of = axis.of;
  return of ? lines.map((line) => ({ ...line, steps: line.steps.map((step) => of(line, step)) })) : lines;
}

function download(title: string, axis: Axis, lines: Line[], table: Joined): void {
  const cell = (text: string) => (/[",\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text);
  const wide = lines.flatMap((line, i) => [[line.name, table.columns[i]!] as const,
    ...(line.low && line.high ? (["low", "high"] as const).map((end) => [`${line.name} ${end}`, joined([{ ...line, values: line[end]! }], table.steps).columns[0]!] as const) : [])]);
  const rows = [[axis.name, ...wide.map(([name]) => name)], ...table.steps.map((step, i) => [String(step), ...wide.map(([, column]) => String(column[i] ?? ""))])];
  const url = URL.createObjectURL(new Blob([rows.map((row) => row.map(cell).join(",")).join("\n") + "\n"], { type: "text/csv" }));
  const anchor = document.createElement("a");
  anchor.href = url;
  anchor.download = `${title.replace(/[^\w.-]+/g, "-")}.csv`;
  anchor.click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}

interface Joined { steps: number[]; columns: Column[] }

/** All lines over the union of their steps. */
function joined(lines: Line[], over?: number[]): Joined {
  const steps = over ?? [...new Set(lines.flatMap((line) => line.steps))].sort((a, b) => a - b);
  const where = new Map(steps.map((step, i) => [step, i]));
  const columns = lines.map((line) => {
    const column: Column = new Array<number | null>(steps.length).fill(null);
    line.steps.forEach((step, i) => { column[where.get(step)!] = line.values[i] ?? null; });
    return column;
  });
  return { steps, columns };
}

/** What is drawn: raw and smoothed lines, or bars on top of each other. */
function drawn(table: Joined, lines: Line[], smoothing: number, stacked: boolean): uPlot.AlignedData {
  if (stacked) {
    const sums = table.steps.map(() => 0);
    const heights = table.columns.map((column) => column.map((value, i) => (sums[i]! += value ?? 0)));
    return [table.steps, ...heights.reverse()];  // the highest first: each covers the foot of the one before
  }
  if (!smoothing) return [table.steps, ...table.columns];
  return [table.steps, ...table.columns.flatMap((column, i) => (lines[i]!.points ? [column] : [column, smoothed(column, smoothing)]))];
}

/** An exponential mean that gives its first values no more weight than the others. */
export function smoothed(column: Column, weight: number): Column {
  let sum = 0, all = 0;
  return column.map((value) => {
    if (value === null) return null;
    sum = weight * sum + (1 - weight) * value;
    all = weight * all + (1 - weight);
    return sum / all;
  });
}

interface Interval { step: number; low: number; high: number; colour: string }

function bars(lines: Line[]): Interval[] {
  return lines.flatMap((line) => line.steps.flatMap((step, i) => {
    const low = line.low?.[i], high = line.high?.[i];
    return low === null || low === undefined || high === null || high === undefined ? [] : [{ step, low, high, colour: line.colour }];
  }));
}

function span(steps: number[], room: number): Range {
  const min = (steps[0] ?? 0) - room, max = (steps.at(-1) ?? 1) + room;
  return min === max ? { min: min - 1, max: max + 1 } : { min, max };
}

function lastRow(table: Joined): number | null {
  return table.steps.length ? table.steps.length - 1 : null;
}

/** The value of a row; of the last one, the last that is known. */
function near(column: Column, row: number, last: boolean): number | null {
  if (!last) return column[row] ?? null;
  for (let i = row; i >= 0; i--) if (column[i] !== null && column[i] !== undefined) return column[i]!;
  return null;
}

function options(
  width: number, height: number, lines: Line[], smooth: boolean, stacked: boolean, intervals: () => Interval[],
  zoom: (range: Range | null) => void, point: (row: number | null) => void, whole: boolean,
): uPlot.Options {
  const axis: uPlot.Axis = {
    stroke: colour("muted"), font: "11px system-ui, sans-serif", grid: { stroke: colour("line"), width: 1 },
    ticks: { show: false },
  };
  return {
    width, height, padding: [10, 8, 0, 0], legend: { show: false },
    cursor: {
      sync: { key: "steps" }, drag: { x: true, y: false, setScale: false }, points: { size: 6, show: !stacked },
      bind: { dblclick: () => () => { zoom(null); return null; } },
    },
    scales: {
      x: { time: false },
      y: { range: (u, low, high) => { void u; return reach(low, high, intervals(), stacked); } },
    },
    axes: [
      { ...axis, size: 26, space: 60, incrs: [...(whole ? [] : [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5]), 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000] },
      { ...axis, size: 52, space: 34, values: (_, ticks) => ticks.map((tick) => short(tick)) },
    ],
    series: [{}, ...(stacked ? lines.toReversed() : lines).flatMap((line) => series(line, smooth, stacked))],
    hooks: {
      setSelect: [(u) => {
        if (u.select.width < 4) return;
        const min = u.posToVal(u.select.left, "x"), max = u.posToVal(u.select.left + u.select.width, "x");
        u.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
        zoom({ min, max });
      }],
      setCursor: [(u) => point(u.cursor.idx ?? null)],
      draw: [(u) => drawIntervals(u, intervals())],
    },
  };
}

function series(line: Line, smooth: boolean, stacked: boolean): uPlot.Series[] {
  const stroke = colour(line.colour);
  if (stacked) {
    return [{ stroke, fill: stroke, width: 0, points: { show: false }, paths: uPlot.paths.bars!({ size: [0.86, 60] }) }];
  }
  if (line.points) return [{ stroke, width: 1, dash: [4, 4], spanGaps: true, points: { show: true, size: 8, fill: stroke } }];
  const full: uPlot.Series = { stroke, width: 2, spanGaps: true, points: { size: 4 } };
  return smooth ? [{ ...full, stroke: `${stroke}55`, width: 1, points: { show: false } }, { ...full, points: { show: false } }] : [full];
}

/** The range of values, with room; a curve that does not move lies in the middle. */
function reach(low: number | null, high: number | null, intervals: Interval[], stacked: boolean): [number, number] {
  let from = low ?? 0, to = high ?? 1;
  for (const interval of intervals) { from = Math.min(from, interval.low); to = Math.max(to, interval.high); }
  if (stacked) return [0, to * 1.05 || 1];
  const room = (to - from) * 0.08 || Math.abs(to) * 0.1 || 0.5;
  return [from >= 0 && from - room < 0 ? Math.min(0, from) : from - room, to + room];
}

function short(value: number): string {
  const size = Math.abs(value);
  if (size >= 1e9) return `${+(value / 1e9).toFixed(1)}G`;
  if (size >= 1e6) return `${+(value / 1e6).toFixed(1)}M`;
  if (size >= 1e4) return `${+(value / 1e3).toFixed(1)}k`;
  return size && size < 1e-3 ? value.toExponential(0).replace("e+", "e") : String(+value.toPrecision(4));
}

function drawIntervals(u: uPlot, intervals: Interval[]): void {
  const { ctx } = u;
  ctx.save();
  ctx.beginPath();
  ctx.rect(u.bbox.left, u.bbox.top, u.bbox.width, u.bbox.height);
  ctx.clip();
  ctx.lineWidth = 1.5 * devicePixelRatio;
  for (const { step, low, high, colour: name } of intervals) {
    const x = u.valToPos(step, "x", true), a = u.valToPos(low, "y", true), b = u.valToPos(high, "y", true);
    const cap = 4 * devicePixelRatio;
    ctx.strokeStyle = colour(name);
    ctx.beginPath();
    ctx.moveTo(x, a); ctx.lineTo(x, b);
    ctx.moveTo(x - cap, a); ctx.lineTo(x + cap, a);
    ctx.moveTo(x - cap, b); ctx.lineTo(x + cap, b);
    ctx.stroke();
  }
  ctx.restore();
}

/** A small curve without axes. */
export function Spark({ values, label }: { values: Column; label: string }) {
  const known = values.filter((value): value is number => value !== null);
  if (known.length < 2) return null;
  const low = Math.min(...known), reachOf = Math.max(...known) - low || 1;
  const points = values.flatMap((value, i) => (value === null ? [] : [`${(100 * i) / (values.length - 1)},${24 - (22 * (value - low)) / reachOf}`]));
  return (
    <svg class="spark" viewBox="-2 0 104 26" role="img" aria-label={label} preserveAspectRatio="none">
      <polyline points={points.join(" ")} fill="none" stroke="var(--s1)" stroke-width="2" vector-effect="non-scaling-stroke" />
    </svg>
  );
}
