// Verdicts: of each image one per list, since every list asks something else. They are kept in this browser under the
// fingerprint of the data, so that a page that is written anew for the same images finds them again. Each has the time
// at which it was given, and the later one counts: so several tabs can write, and none overwrites what another one has.
const KEY = `adasim-explore:${D.fingerprint}`;
const MEANING = { reject: "leave out", relabel: "wrong label", unsure: "unsure", keep: "keep" };  // the weightiest first
const rank = (entry) => Object.keys(MEANING).indexOf(entry.verdict);

const verdicts = new Map();  // by image: [{verdict, label, view, at}, ...]; one whose verdict is null was taken back
const latest = (id, view) => (verdicts.get(id) || []).find((entry) => entry.view === view);
const entriesOf = (id) => (verdicts.get(id) || []).filter(({ verdict }) => verdict);
const given = (id, view) => entriesOf(id).find((entry) => entry.view === view);
const leftOutElsewhere = (id, view) =>
  entriesOf(id).find((entry) => entry.verdict === "reject" && entry.view !== view);

// What becomes of an image: its weightiest verdict, of several wrong labels the one that says which is right.
const byWeight = (a, b) => rank(a) - rank(b) || !a.label - !b.label;
const verdictOn = (id) => entriesOf(id).sort(byWeight)[0];

function put(id, entry) {  // unless that list has a later verdict
  const before = latest(id, entry.view);
  if (before && before.at >= entry.at) return;
  verdicts.set(id, (verdicts.get(id) || []).filter((one) => one !== before).concat(entry));
}

// Takes over what this page or another tab has stored, and tells whether all that is known here was among it.
function merge(read = () => localStorage.getItem(KEY)) {
  let saved = null;
  try { saved = JSON.parse(read()); } catch { /* the browser forbids it, or it is not ours: there is nothing to take over */ }
  let known = 0;
  for (const [key, entries] of Object.entries(saved || {})) {
    const id = Number(key);
    for (const entry of [entries].flat()) {
      if (!(id < D.count) || !entry || (rank(entry) < 0 && entry.verdict !== null)) continue;
      const at = Number(entry.at) || 0;
      put(id, { ...entry, at });
      known += latest(id, entry.view).at === at;
    }
  }
  return known === [...verdicts.values()].flat().length;
}

let stored = true;    // whether the browser keeps verdicts
let unsaved = false;  // whether a verdict is in this tab alone: neither the browser nor a file has it
const undone = [];

function save() {
  try {
    localStorage.setItem(KEY, JSON.stringify(Object.fromEntries(verdicts)));
    stored = true;
    unsaved = false;
  } catch {
    stored = false;
  }
  $("undo").disabled = !undone.length;
  warn();
}

// Stays in sight for as long as the browser keeps nothing.
function warn() {
  $("notice").hidden = stored;
  $("notice").classList.toggle("unsaved", unsaved);
  const words = unsaved
    ? ["Your verdicts are in this tab alone.", " This browser cannot keep them: its storage is full, or closed to this " +
      "page. Save them to a file before you leave."]
    : ["This browser cannot keep verdicts.", " Its storage is full, or closed to this page. Save them to a file before " +
      "you leave, and load it to go on."];
  if ($("warning").textContent !== words.join("")) $("warning").replaceChildren(h("b", {}, words[0]), words[1]);
}

function change(changes) {
  for (const [id, entry] of changes) {
    const before = latest(id, entry.view);
    put(id, { ...entry, at: Math.max(Date.now(), before ? before.at + 1 : 0) });
  }
  unsaved = true;
  save();
}

// changes: [[image, {verdict, label, view}], ...], undone together
function decide(changes, where) {
  merge();
  undone.push({ where, before: changes.map(([id, { view }]) => [id, given(id, view) || { verdict: null, view }]) });
  change(changes);
}

function undo() {
  const last = undone.pop();
  if (!last) return null;
  merge();
  change(last.before);
  return last.where;
}

merge();
save();  // a browser that keeps nothing is told of now, not after the first verdict
