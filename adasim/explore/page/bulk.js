// A verdict for many at once: all that a list shows, or all images that are selected. It says how many of them were not
// seen, and one undo takes it back.
const seen = new Set();  // images whose picture was in sight

const MANY_CLASSES = 2000;  // more of them make no list to choose from
function labelChoice(id, words) {
  if (!D.classes.length || D.classes.length > MANY_CLASSES) return null;
  return h("select", { id, "aria-label": words }, h("option", { value: "" }, words),
    D.classes.map((name) => h("option", { value: name }, name)));
}

// items: [{ids, ...}]; changes(item, verdict, label) gives what a verdict on one of them changes; done() redraws
function judgeMany({ view, items, what, changes, isReviewed, done }) {
  const ids = items.flatMap((item) => item.ids);
  const unseen = ids.filter((id) => !seen.has(id)).length;
  const judged = items.filter(isReviewed).length;
  const dialog = $("bulk");
  const again = h("input", { type: "checkbox", id: "again" });
  const label = view === "neighbours" ? labelChoice("new-label", "right label…") : null;
  const apply = (verdict, words) => {
    const chosen = again.checked ? items : items.filter((item) => !isReviewed(item));
    decide(chosen.flatMap((item) => changes(item, verdict, label ? label.value : "")), { view, ids: chosen.length ? chosen[0].ids : [] });
    dialog.close();
    tellOf(`${words}: ${counted(chosen.length, view === "duplicates" ? "group" : "image")}.`);
    done();
  };
  dialog.replaceChildren(...[
    h("h2", { id: "bulk-title" }, `A verdict for ${view === "duplicates" ? counted(items.length, "group") : images(items.length)}`),
    h("p", {}, what),
    h("p", { class: unseen ? "unseen" : "" }, unseen
      ? `You have not seen ${unseen === ids.length ? "any" : number(unseen)} of these ${images(ids.length)} yet.`
      : `You have seen all of these ${images(ids.length)}.`),
    judged ? h("p", {}, h("label", { for: "again" }, again, ` Also replace the ${counted(judged, "verdict")} that you have given already`)) : null,
    h("div", { class: "verdicts" }, VERDICTS[view === "neighbours" ? "lonely" : view].map(([verdict, words]) =>
      h("button", { type: "button", class: verdict, onclick: () => apply(verdict, words) }, words, verdict === "relabel" && label ? ":" : ""))),
    h("form", { method: "dialog" }, h("button", {}, "Cancel")),
  ].filter(Boolean));
  if (label) dialog.querySelector(".relabel").after(label);
  dialog.showModal();
}

let fading = 0;
function tellOf(sentence) {  // for the eye and for a screen reader, with the way back
  say(`${sentence} Press u to undo.`);
  $("toast").replaceChildren(h("span", {}, sentence), h("button", { type: "button", onclick: takeBack }, "Undo"));
  $("toast").hidden = false;
  clearTimeout(fading);
  fading = setTimeout(() => { $("toast").hidden = true; }, 8000);
}
