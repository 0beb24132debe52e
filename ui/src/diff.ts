// What two texts have in common, word by word.
export interface Piece { text: string; kind: "same" | "only" }

const MOST = 2500; // words of a text: the table of the comparison grows with the square

export function diff(a: string, b: string): [Piece[], Piece[]] {
  const x = words(a), y = words(b);
  let start = 0;
  while (start < x.length && start < y.length && x[start] === y[start]) start++;
  let end = 0;
  while (end < x.length - start && end < y.length - start && x[x.length - 1 - end] === y[y.length - 1 - end]) end++;
  const [p, q] = middle(x.slice(start, x.length - end), y.slice(start, y.length - end));
  const around = (own: string[], inner: Piece[]) => merged([
    { text: own.slice(0, start).join(""), kind: "same" }, ...inner, { text: own.slice(own.length - end).join(""), kind: "same" },
  ]);
  return [around(x, p), around(y, q)];
}

const words = (text: string) => text.match(/\s+|[\p{L}\p{N}_]+|[^\s\p{L}\p{N}_]/gu) ?? [];

/** The longest common sequence of words; of texts too long for that, nothing. */
function middle(x: string[], y: string[]): [Piece[], Piece[]] {
  if (x.length > MOST || y.length > MOST) return [[{ text: x.join(""), kind: "only" }], [{ text: y.join(""), kind: "only" }]];
  const width = y.length + 1;
  const table = new Uint16Array((x.length + 1) * width);
  for (let i = x.length - 1; i >= 0; i--) {
    for (let j = y.length - 1; j >= 0; j--) {
      table[i * width + j] = x[i] === y[j] ? table[(i + 1) * width + j + 1]! + 1 : Math.max(table[(i + 1) * width + j]!, table[i * width + j + 1]!);
    }
  }
  const a: Piece[] = [], b: Piece[] = [];
  let i = 0, j = 0;
  while (i < x.length || j < y.length) {
    if (i < x.length && j < y.length && x[i] === y[j]) {
      a.push({ text: x[i++]!, kind: "same" });
      b.push({ text: y[j++]!, kind: "same" });
    } else if (j >= y.length || (i < x.length && table[(i + 1) * width + j]! >= table[i * width + j + 1]!)) a.push({ text: x[i++]!, kind: "only" });
    else b.push({ text: y[j++]!, kind: "only" });
  }
  return [a, b];
}

function merged(pieces: Piece[]): Piece[] {
  const found: Piece[] = [];
  for (const piece of pieces) {
    const last = found.at(-1);
    if (!piece.text) continue;
    if (last?.kind === piece.kind) last.text += piece.text;
    else found.push({ ...piece });
  }
  return found;
}
