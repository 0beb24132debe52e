// Tokens with a colour for what is known of each.
import { useMemo, useState } from "preact/hooks";
import { number } from "./format";
import type { ChainTokens } from "./records";

type Column = (number | null)[];
interface Scale { low: number; high: number; kind: "low" | "both" | "steps" }

/** How a column is coloured: from 0 down for log-probs, to both sides of 0 or (ratios, weights, gates) of 1, or from its
 * smallest to its largest. */
function scaleOf(name: string, values: Column): Scale {
  const known = values.filter((value): value is number => value !== null);
  const low = Math.min(...known), high = Math.max(...known);
  if (/logp/.test(name)) return { low: Math.min(low, -1), high: 0, kind: "low" };
  if (/version/.test(name)) return { low, high, kind: "steps" };
  if (low < 0 && high > 0) { const most = Math.max(-low, high); return { low: -most, high: most, kind: "both" }; }
  if (/ratio|weight|gate|correction/.test(name)) { const most = Math.max(Math.abs(low - 1), Math.abs(high - 1), 0.01); return { low: 1 - most, high: 1 + most, kind: "both" }; }
  return high <= 0 ? { low, high: 0, kind: "low" } : { low: Math.min(0, low), high: high || 1, kind: "steps" };
}

/** `heat-3` is the third of seven shades of a hue; the style sheet has them for both themes. */
function shade(value: number | null, scale: Scale): string {
  if (value === null) return "";
  const reach = scale.high - scale.low;
  if (scale.kind === "both") {
    const part = reach ? (value - (scale.low + scale.high) / 2) / (reach / 2) : 0;
    return level(part < 0 ? "cold" : "heat", Math.abs(part));
  }
  const part = reach ? (value - scale.low) / reach : scale.kind === "steps" ? 0.4 : 0;
  return scale.kind === "low" ? level("heat", 1 - part) : level("cold", part);
}

const level = (hue: string, part: number) => { const n = Math.round(Math.min(1, Math.sqrt(part)) * 7); return n ? `${hue}-${n}` : ""; };

export function Heat({ chain, column, onColumn, readable }: { chain: ChainTokens; column: string; onColumn: (name: string) => void; readable: boolean }) {
  const names = Object.keys(chain.columns);
  const name = names.includes(column) ? column : names[0]!;
  const values = chain.columns[name] ?? [];
  const scale = useMemo(() => scaleOf(name, values), [name, values]);
  const [at, setAt] = useState<number | null>(null);
  const [prompt, setPrompt] = useState(false);
  const point = (event: Event) => {
    const token = (event.target as HTMLElement).closest<HTMLElement>("[data-i]");
    if (token) setAt(Number(token.dataset["i"]));
  };
  const move = (event: KeyboardEvent) => {
    const by = event.key === "ArrowRight" ? 1 : event.key === "ArrowLeft" ? -1 : 0;
    if (!by) return;
    event.preventDefault();
    event.stopPropagation();
    setAt((old) => Math.max(0, Math.min(chain.tokens.length - 1, (old ?? -1) + by)));
  };
  return (
    <div class="heat">
      <div class="bar tools">
        <div class="tabs small" role="radiogroup" aria-label="What the colours show">
          {names.map((each) => <button key={each} role="radio" aria-checked={each === name} class={each === name ? "on" : ""} onClick={() => onColumn(each)}>{each}</button>)}
        </div>
        <Key scale={scale} />
        <span class="grow" />
        <button class="quiet" aria-pressed={prompt} onClick={() => setPrompt(!prompt)}>{prompt ? "hide prompt" : "show prompt"}</button>
      </div>
      {!readable && <p class="small muted">The tokenizer of this run is not on this machine: tokens are shown as numbers.</p>}
      <div class="tokens" tabIndex={0} role="group" aria-label={`Tokens coloured by ${name}; arrow keys move`} onPointerOver={point} onClick={point} onKeyDown={move}>
        {prompt && <span class="prompt">{chain.prompt.join("")}</span>}
        {chain.pieces.map((piece, i) => (
          <span key={i} data-i={i} data-value={values[i] ?? ""} class={`${chain.by_model[i] ? shade(values[i] ?? null, scale) : "outside"}${i === at ? " at" : ""}`}>{visible(piece)}</span>
        ))}
      </div>
      <div class="facts small token-facts" role="status">
        {at === null ? <span class="muted">Point at a token, or use the arrow keys</span> : <>
          <span>token <b>{at + 1}</b></span><span>id <b>{chain.tokens[at]}</b></span><span><code>{JSON.stringify(chain.pieces[at])}</code></span>
          {names.map((each) => {
            const value = chain.columns[each]![at] ?? null;
            return value === null ? null : <span key={each}>{each} <b>{number(value, 4)}</b>{each === "logprob" && <span class="muted"> p {number(Math.exp(value), 3)}</span>}</span>;
          })}
          {!chain.by_model[at] && <span class="muted">not sampled by the model</span>}
        </>}
      </div>
    </div>
  );
}

/** Line ends are shown and kept. */
const visible = (piece: string) => piece.replace(/\n/g, "↵\n");

function Key({ scale }: { scale: Scale }) {
  const steps = scale.kind === "both" ? ["cold-7", "cold-4", "", "heat-4", "heat-7"] : scale.kind === "low" ? ["heat-7", "heat-5", "heat-3", "heat-1", ""] : ["", "cold-1", "cold-3", "cold-5", "cold-7"];
  return <span class="key small muted" aria-hidden="true">{number(scale.low, 2)}{steps.map((step, i) => <i key={i} class={step} />)}{number(scale.high, 2)}</span>;
}
