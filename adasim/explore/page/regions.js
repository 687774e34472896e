// Images by where they lie on the map: boxes of about as many images each, and some images in words.
const REGIONS = 4;  // times that what is in view is halved

// About 2^times boxes, halved across their longer side.
function halve(ids, times) {
  if (!times || ids.length < 8) return ids.length ? [ids] : [];
  const { x, y } = placesOf();
  const [left, top, right, bottom] = boundsOf(ids);
  const values = right - left > bottom - top ? x : y;
  const middle = Float32Array.from(ids, (i) => values[i]).sort()[ids.length >> 1];
  const [less, more] = [ids.filter((i) => values[i] < middle), ids.filter((i) => values[i] >= middle)];
  return less.length ? [...halve(less, times - 1), ...halve(more, times - 1)] : [ids];
}

function boundsOf(ids) {
  const { x, y } = placesOf();
  const bounds = [1, 1, 0, 0];
  for (const i of ids) {
    bounds[0] = Math.min(bounds[0], x[i]);
    bounds[1] = Math.min(bounds[1], y[i]);
    bounds[2] = Math.max(bounds[2], x[i]);
    bounds[3] = Math.max(bounds[3], y[i]);
  }
  return bounds;
}

const spread = (ids, count) => Array.from({ length: Math.min(count, ids.length) }, (_, n) => ids[Math.floor((n * ids.length) / Math.min(count, ids.length))]);

// Some images in words: their most common labels, and how many stand in a list.
function describe(ids) {
  const counts = new Map();
  if (LABELS) for (const i of ids) if (LABELS[i] >= 0) counts.set(LABELS[i], (counts.get(LABELS[i]) || 0) + 1);
  const common = [...counts].sort((a, b) => b[1] - a[1]).slice(0, 3).map(([c, count]) => `${D.classes[c]} ${percent(count / ids.length)}`);
  const lists = VIEWS.filter(({ count, absent }) => count && !absent).map(({ name }) => findingsOf(name));
  const marked = ids.filter((i) => lists.some((set) => set.has(i))).length;
  return [common.join(", "), marked ? `${number(marked)} in a list of findings` : ""].filter(Boolean).join(" · ");
}
