// Two texts word by word: what both have, and what only one has.
import { h, num } from "./dom.js";

/** Words of a text that are compared; the table of a comparison has their product. */
const MOST = 1500;

/** Words and the blanks between them, and whether some were left out. */
const words = (text) => {
  const all = text.split(/(\s+)/).filter((w) => w !== "");
  return [all.slice(0, MOST), all.length - Math.min(all.length, MOST)];
};

/** Parts in order as `[kind, text]`: `same`, `a` (in the first only), `b` (in the second only). By the longest common part. */
export function parts(a, b) {
  const width = b.length + 1, table = new Uint16Array((a.length + 1) * width);
  for (let i = a.length - 1; i >= 0; i--) {
    for (let j = b.length - 1; j >= 0; j--) {
      table[i * width + j] = a[i] === b[j] ? table[(i + 1) * width + j + 1] + 1 : Math.max(table[(i + 1) * width + j], table[i * width + j + 1]);
    }
  }
  const out = [];
  const put = (kind, word) => { if (out.at(-1)?.[0] === kind) out.at(-1)[1] += word; else out.push([kind, word]); };
  let i = 0, j = 0;
  while (i < a.length || j < b.length) {
    if (i < a.length && j < b.length && a[i] === b[j]) { put("same", a[i]); i++; j++; }
    else if (j >= b.length || (i < a.length && table[(i + 1) * width + j] >= table[i * width + j + 1])) put("a", a[i++]);
    else put("b", b[j++]);
  }
  return out;
}

/** Both texts with the words marked that the other does not have. */
export function difference(a, b) {
  const [first, cutA] = words(a), [second, cutB] = words(b), all = parts(first, second);
  const side = (own, mark, cut) => h("div", { class: "said diff" },
    all.filter(([kind]) => kind === "same" || kind === own).map(([kind, text]) => (kind === "same" ? text : h(mark, {}, text))),
    cut > 0 && h("p", { class: "mute" }, `${num(cut)} more words and blanks are not compared.`));
  return [side("a", "del", cutA), side("b", "ins", cutB)];
}
