// A run as one file: everything about it on one page, to send to somebody and to print.
import type { ComponentChildren } from "preact";
import { ask, useData } from "../api";
import { fixed, interval, number, seconds, signed } from "../format";
import { Empty, Reward, Stat, Status, Waiting } from "../parts";
import type { AnswerPair, ReportCard, RunDetail, RunReport, SampleView, Series } from "../records";
import { usePlace } from "../router";
import { Config, Events, Findings } from "./about";
import { Curves } from "./curves";
import { Idle, Lanes } from "./timeline";

const KEY = "run"; // what kitae/ui/report_file.py calls the one run of a report
const MOST_CURVES = 12;
const COUNTS = ["prompts", "examples", "samples", "length", "truncated", "errors"];

export function Report() {
  const state = useData(ask.run(KEY));
  const report = useData(ask.report(KEY));
  const { query } = usePlace();
  if (!state.data || !report.data) return <main><Waiting state={state.error ? state : report} what="Reading the run" /></main>;
  const run = state.data, extra = report.data;
  return (
    <main class="report">
      <Head run={run} report={extra} />
      <Part title="Diagnosis"><Findings run={run} /></Part>
      <Part title="Curves">
        {extra.every > 1 && <p class="muted small">Every {extra.every}th step is shown.</p>}
        <Curves run={run} query={query} most={MOST_CURVES} head={false} />
      </Part>
      {extra.evaluations > 0 && <Part title="Evaluations"><Evaluations report={extra} /></Part>}
      {extra.before_after.length > 0 && <Part title="Before and after, on the same prompts"><BeforeAfter report={extra} /></Part>}
      <Cards title="Best answers" cards={extra.best} />
      <Cards title="Worst answers" cards={extra.worst} />
      <Cards title="Groups" cards={extra.groups} />
      <Part title="Where the time went"><Time run={run} report={extra} /></Part>
      <Part title="Settings"><Config run={run} folded /></Part>
      {run.events.length > 0 && <Part title="What happened"><Events run={run} /></Part>}
      <footer class="muted small">{extra.made} This file holds everything it shows and asks for nothing.</footer>
    </main>
  );
}

function Part({ title, children }: { title: string; children: ComponentChildren }) {
  return <section class="part"><h2>{title}</h2>{children}</section>;
}

function Head({ run: { summary: s }, report }: { run: RunDetail; report: RunReport }) {
  return (
    <header>
      <div class="bar runhead"><h1>{s.name}</h1><Status status={s.status} /></div>
      <p class="muted">{s.title}</p>
      <dl class="stats">
        <Stat name="step">{number(s.step)}{s.steps !== null && <span class="muted"> of {number(s.steps)}</span>}</Stat>
        {s.before && <Stat name={`held-out ${report.measure}`}>{fixed(s.before.mean)}{s.after && ` → ${fixed(s.after.mean)}`}<small class="muted">{heldOutFacts(s, report)}</small></Stat>}
        {report.first !== null && <Stat name={s.metric}>{fixed(report.first)} → {fixed(report.last)}<small class="muted">first and last step</small></Stat>}
        <Stat name="time">{seconds(report.seconds)}{s.step_seconds !== null && <small class="muted">{seconds(s.step_seconds)} a step</small>}</Stat>
        <Stat name="tokens per second">{s.speed === null ? "–" : number(Math.round(s.speed))}</Stat>
      </dl>
      <p class="muted small">{report.machine.map((line, i) => <span key={i}>{line}<br /></span>)}</p>
    </header>
  );
}

function heldOutFacts({ before, after }: RunDetail["summary"], { paired }: RunReport): string {
  if (after && paired.difference !== null && paired.low !== null && paired.high !== null && paired.p !== null) {
    const p = paired.p < 0.001 ? "p < 0.001" : `p = ${fixed(paired.p)}`;
    return `${signed(paired.difference)} [${signed(paired.low)}, ${signed(paired.high)}], ${p}, on the same ${paired.prompts}`;
  }
  const last = after ?? before;
  return last && last.low !== null ? `${fixed(last.low)} – ${fixed(last.high)}${after ? " at the end" : ""}` : "";
}

/** A table for the run's own task and for each other suite, whose columns have its name before theirs. */
function Evaluations({ report }: { report: RunReport }) {
  const state = useData(ask.series(KEY, []));
  const series = state.data;
  if (!series) return <Waiting state={state} what="Reading evaluations" />;
  const suites = Object.keys(series.evaluations).flatMap((name) => (name === "avg" || name.endsWith("/avg") ? [name.slice(0, -3)] : []));
  return (
    <>
      {suites.map((suite) => <Evaluated key={suite} suite={suite} series={series} measure={report.measure} />)}
      <p class="muted small">Means with 95 % intervals.{report.evaluations > series.evaluation_steps.length && ` The first and the last ${series.evaluation_steps.length - 1} of ${report.evaluations} evaluations.`}</p>
    </>
  );
}

function Evaluated({ suite, series: { evaluation_steps: steps, evaluations }, measure }: { suite: string; series: Series; measure: string }) {
  const column = (name: string) => evaluations[suite + name] ?? [];
  const names = Object.keys(evaluations).filter((name) => name.startsWith(suite)).map((name) => name.slice(suite.length));
  // With one sample of a prompt, pass@1 is the mean score.
  const marks = names.filter((name) => name !== "avg" && names.includes(`${name}_low`) && column(name).some((value, i) => value !== column("avg")[i]));
  const counts = COUNTS.filter((name) => column(name).some((value) => value));
  const rows = steps.flatMap((step, i) => (column("avg")[i] === null || column("avg")[i] === undefined ? [] : [{ step, i }]));
  return (
    <>
      {suite && <h3>{suite.slice(0, -1)}</h3>}
      <div class="card flush scroll-x evaluated" tabIndex={0}>
        <table class="plain">
          <thead><tr><th>step</th><th>{measure}</th>{[...marks, ...counts].map((name) => <th key={name}>{name}</th>)}</tr></thead>
          <tbody>{rows.map(({ step, i }) => (
            <tr key={step}><td>{number(step)}</td>
              {["avg", ...marks].map((name) => <td key={name}>{interval(column(name)[i], column(`${name}_low`)[i], column(`${name}_high`)[i])}</td>)}
              {counts.map((name) => <td key={name}>{number(column(name)[i])}</td>)}</tr>
          ))}</tbody>
        </table>
      </div>
    </>
  );
}

function BeforeAfter({ report }: { report: RunReport }) {
  const counts = Object.entries(report.moved).map(([kind, count]) => `${count} ${kind}`).join(", ");
  return (
    <>
      <p class="muted small">{counts ? `Held-out prompts, first and last evaluation: ${counts}.` : "Training prompts, first and last time."}</p>
      {report.before_after.map((pair, i) => <Pair key={i} pair={pair} />)}
    </>
  );
}

function Pair({ pair }: { pair: AnswerPair }) {
  const side = (at: string, text: string, value: number | null) => (
    <div><p class="small"><Reward value={value} outcome="scored" /> {at}</p><pre class="answer">{text || "(nothing)"}</pre></div>
  );
  return (
    <article class="card">
      <Asked question={pair.question} reference={pair.reference} />
      <div class="two">{side(pair.first_at, pair.first, pair.first_value)}{side(pair.last_at, pair.last, pair.last_value)}</div>
    </article>
  );
}

function Cards({ title, cards }: { title: string; cards: ReportCard[] }) {
  if (!cards.length) return null;
  return (
    <Part title={title}>
      <div class="cards">{cards.map((card, i) => (
        <article key={i} class="card">
          <p class="muted small">{card.title}</p>
          <Asked question={card.question} reference={card.reference} />
          {card.samples.map((sample) => <Sample key={sample.sample} sample={sample} />)}
        </article>
      ))}</div>
    </Part>
  );
}

function Asked({ question, reference }: { question: string; reference: string }) {
  return <><pre class="asked">{question}</pre>{reference && <p class="muted small">reference: <code>{reference}</code></p>}</>;
}

function Sample({ sample }: { sample: SampleView }) {
  const facts = [`sample ${sample.sample}`, `${sample.length} tokens`, sample.finish === "length" ? "cut off" : sample.finish];
  facts.push(...Object.entries(sample.components).map(([name, value]) => `${name} ${number(value)}`));
  return (
    <>
      <p class="small facts"><Reward value={sample.value} outcome={sample.outcome} /> <span>{facts.join(" · ")}</span></p>
      <pre class="answer">{sample.text || "(nothing)"}</pre>
      {sample.detail && <p class="muted small breaks">{sample.detail}</p>}
    </>
  );
}

function Time({ run, report }: { run: RunDetail; report: RunReport }) {
  const lanes = useData(ask.timeline(KEY, ""));
  const whole = Object.values(report.phases).reduce((a, b) => a + b, 0);
  const phases = Object.entries(report.phases).filter(([, value]) => value / whole >= 0.0005).sort((a, b) => b[1] - a[1]);
  const percent = (part: number) => `${(100 * part).toFixed(1)}%`;
  return (
    <>
      {phases.length > 0 && <Rows title="Phases of a step, all steps together" names={["phase", "time", "share"]}
        rows={phases.map(([name, value]) => [name.replace(/_seconds$/, ""), seconds(value), percent(value / whole)])} />}
      {Object.keys(report.busy).length > 0 && <Rows title="Who worked, and who waited" names={["part", "at work", "waiting"]}
        rows={Object.entries(report.busy).map(([part, share]) => [part, percent(share), percent(1 - share)])} />}
      {lanes.data && lanes.data.spans.length > 0 && <><h3>The last steps, {lanes.data.first} to {lanes.data.last}</h3><Lanes found={lanes.data} /></>}
      <Idle run={run} />
      {!phases.length && !lanes.data?.spans.length && <Empty>This run has no timeline yet.</Empty>}
    </>
  );
}

function Rows({ title, names, rows }: { title: string; names: string[]; rows: string[][] }) {
  return (
    <>
      <h3>{title}</h3>
      <div class="card flush"><table class="plain">
        <thead><tr>{names.map((name) => <th key={name}>{name}</th>)}</tr></thead>
        <tbody>{rows.map((row) => <tr key={row[0]}>{row.map((cell, i) => <td key={i}>{cell}</td>)}</tr>)}</tbody>
      </table></div>
    </>
  );
}
