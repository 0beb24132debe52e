// Numbers as people read them.
export function number(value: number | null | undefined, digits = 3): string {
  if (value === null || value === undefined) return "–";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e6) return value.toLocaleString("en");
  if (size >= 1e6 || size < 1e-3) return value.toExponential(2).replace("e+", "e");
  return size >= 1000 ? Math.round(value).toLocaleString("en") : value.toPrecision(Math.max(digits, 1)).replace(/(\.\d*?)0+$/, "$1").replace(/\.$/, "");
}

export const fixed = (value: number | null | undefined, digits = 3) => (value === null || value === undefined ? "–" : value.toFixed(digits));

export function seconds(value: number | null | undefined): string {
  if (value === null || value === undefined) return "–";
  if (value < 10) return `${value.toFixed(1)} s`;
  if (value < 100) return `${value.toFixed(0)} s`;
  if (value < 6000) return `${Math.round(value / 60)} min`;
  return value < 172800 ? `${(value / 3600).toFixed(1)} h` : `${Math.round(value / 86400)} d`;
}

export function size(bytes: number): string {
  let value = bytes;
  for (const unit of ["B", "KB", "MB"]) {
    if (value < 1000) return `${value.toFixed(0)} ${unit}`;
    value /= 1000;
  }
  return `${value.toFixed(1)} GB`;
}

export function ago(time: number): string {
  const past = Date.now() / 1000 - time;
  return past < 5 ? "now" : `${seconds(past)} ago`;
}

export const clock = (time: number) => new Date(time * 1000).toLocaleString(undefined, { dateStyle: "medium", timeStyle: "medium" });

export function setting(value: unknown): string {
  if (value === null || value === undefined) return "–";
  if (typeof value === "number" && value !== 0 && Math.abs(value) < 1e-3) return value.toExponential();
  return typeof value === "string" ? value : JSON.stringify(value);
}

/** Signed, for differences. */
export const signed = (value: number, digits = 3) => `${value >= 0 ? "+" : "−"}${Math.abs(value).toFixed(digits)}`;

/** A mean with its 95 % interval, where there is one. */
export const interval = (mean: number | null | undefined, low: number | null | undefined, high: number | null | undefined) =>
  low === null || low === undefined || high === null || high === undefined ? fixed(mean) : `${fixed(mean)} [${fixed(low)}, ${fixed(high)}]`;
