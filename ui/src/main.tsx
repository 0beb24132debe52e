import { render } from "preact";
import { useEffect, useState } from "preact/hooks";
import { ask, isReport, listen, useConnected, useData } from "./api";
import { Help, useKeys } from "./keys";
import { Config, Findings, Log } from "./pages/about";
import { Compare } from "./pages/compare";
import { Curves } from "./pages/curves";
import { Errors } from "./pages/errors";
import { Group } from "./pages/group";
import { Prompts } from "./pages/prompts";
import { Report } from "./pages/report";
import { Rollouts } from "./pages/rollouts";
import { Notes, Runs } from "./pages/runs";
import { Timeline } from "./pages/timeline";
import { Empty, Status, Waiting } from "./parts";
import type { RunDetail } from "./records";
import { link, usePlace, type Place } from "./router";
import "./style.css";
import { nextTheme, startTheme, useTheme } from "./theme";

const PAGES: [string, string][] = [
  ["", "Curves"], ["rollouts", "Rollouts"], ["prompts", "Prompts"], ["errors", "Errors"], ["timeline", "Timeline"],
  ["diagnosis", "Diagnosis"], ["config", "Settings"], ["log", "Log"],
];

function App() {
  const here = usePlace();
  const [help, setHelp] = useState(false);
  useKeys(() => setHelp(true));
  const [kind = "", key = ""] = here.path;
  return (
    <>
      <Top run={kind === "run" ? key : ""} help={() => setHelp(true)} />
      {kind === "run" && key ? <Run run={key} here={here} />
        : <main>{kind === "" ? <Runs query={here.query} /> : kind === "compare" ? <Compare query={here.query} /> : <Empty>There is no such page. <a href="#/">All runs</a></Empty>}</main>}
      <Help open={help} close={() => setHelp(false)} />
    </>
  );
}

function Top({ run, help }: { run: string; help: () => void }) {
  const connected = useConnected();
  const { theme, dark } = useTheme();
  return (
    <header class="top">
      <a class="brand" href="#/" aria-label="Kitae: all runs"><svg viewBox="0 0 32 32" aria-hidden="true"><rect width="32" height="32" rx="8" /><path d="M7 23.5 12.5 16l4.5 4L25 8.5" /></svg><span>Kitae</span></a>
      {run && <><span class="muted slash">/</span><a class="clip crumb" href={link(["run", run])}>{run}</a></>}
      <span class="grow" />
      <span class={`live ${connected ? "on" : ""}`} role="status" title={connected ? "Changes appear by themselves" : "The server does not answer; trying again"}><i />{connected ? "live" : "offline"}</span>
      <a class="quiet button" href={link(["compare"], { runs: run })}>Compare</a>
      <button class="quiet icon" onClick={nextTheme} aria-label={`Theme: ${theme}`} title={`Theme: ${theme}`}>{dark ? "☾" : "☀"}</button>
      <button class="quiet icon wide-only" onClick={help} aria-label="Keys" title="Keys">?</button>
    </header>
  );
}

function Run({ run, here }: { run: string; here: Place }) {
  const state = useData(ask.run(run), [run]);
  const page = here.path[2] ?? "";
  useEffect(() => { document.title = `${run} – Kitae`; return () => { document.title = "Kitae"; }; }, [run]);
  return (
    <>
      {(state.data || !state.error) && <nav class="pages" aria-label="Pages of the run">
        {PAGES.map(([name, title]) => <a key={name} href={link(["run", run, ...(name ? [name] : [])])} aria-current={name === (page === "group" ? "rollouts" : page) ? "page" : undefined}>{title}</a>)}
      </nav>}
      <main>
        {!state.data ? <><Waiting state={state} what="Reading the run" />{state.error && <p><a href="#/">All runs</a></p>}</> : <>
          <div class="bar runhead"><h1>{state.data.summary.name}</h1><Status status={state.data.summary.status} /><span class="muted small clip">{state.data.summary.title}</span></div>
          {page === "" && <Notes run={state.data.summary} />}
          {state.data.summary.problem && <p class="notice bad" role="alert">{state.data.summary.problem}</p>}
          {state.error && <p class="notice bad" role="alert">{state.error}</p>}
          <Page run={state.data} page={page} here={here} />
        </>}
      </main>
    </>
  );
}

function Page({ run, page, here: { path, query } }: { run: RunDetail; page: string; here: Place }) {
  switch (page) {
    case "": return <Curves run={run} query={query} />;
    case "rollouts": return <Rollouts run={run} query={query} />;
    case "group": return <Group run={run} group={Number(path[3] ?? 0)} query={query} />;
    case "prompts": return <Prompts run={run} query={query} />;
    case "errors": return <Errors run={run} />;
    case "timeline": return <Timeline run={run} query={query} />;
    case "diagnosis": return <Findings run={run} />;
    case "config": return <Config run={run} />;
    case "log": return <Log run={run} />;
    default: return <Empty>There is no such page.</Empty>;
  }
}

startTheme();
if (!isReport) listen();
render(isReport ? <Report /> : <App />, document.getElementById("app")!);
