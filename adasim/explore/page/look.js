// A closer look: the image and one of its neighbours, or two copies, side by side and as large as the window allows; from
// their files where the page can reach them. Below them all the others, so that no verdict is given on what was not seen.
let looking = null;  // {ids, first, second, asked}

function large(i, words) {
  const link = fileLink(i);
  const frame = h("div", { class: "frame" }, picture(i));
  if (link && WIDTHS[i]) {
    const img = h("img", { alt: "", decoding: "async" });
    img.addEventListener("load", () => frame.replaceChildren(img));
    img.src = link;  // a format that the browser cannot show leaves the thumbnail where it is
  }
  return h("figure", {}, frame, h("figcaption", {},
    h("b", {}, text(labelOf(i) || shortName(i))), words ? ` ${words}` : "",
    h("span", {}, text(nameOf(i)), ` · ${splitOf(i)} · ${sizeOf(i)} · `,
      h("a", { href: address("neighbours", { image: i }) }, "neighbours"),
      link ? [" · ", h("a", { href: link, target: "_blank", rel: "noopener" }, "file")] : null)));
}

const sharesOf = (i) => new Map(othersOf(i).map(({ id, p }) => [id, p]));

// ids: what is to be seen, the image in question first; shares of its neighbours, by id; words(id) says more about each
function lookAt({ ids, second, shares, words = () => "", buttons, question, heading }) {
  looking = { ids, second: second === undefined || second === ids[0] ? ids[1] : second };
  const dialog = $("look");
  const told = (id) => [words(id), shares.has(id) ? `neighbour, ${percent(shares.get(id))}` : ""].filter(Boolean).join(" · ");
  const most = Math.max(1e-9, ...shares.values());
  const strip = h("div", { class: "every", tabindex: "0", role: "group", "aria-label": "All images of this item" },
    ids.map((id) => {
      const one = tile(id, { chosen: id === looking.second, p: shares.get(id) ?? null, most, note: words(id), differs: labelOf(id) !== labelOf(ids[0]) });
      one.classList.toggle("own", id === ids[0]);
      one.addEventListener("click", (event) => {
        if (event.ctrlKey || event.metaKey || event.shiftKey) return;
        event.preventDefault();
        current.choose(id);
      });
      return one;
    }));
  dialog.replaceChildren(
    h("div", { class: "bar-of-look" }, h("h2", { id: "look-title" }, heading),
      h("form", { method: "dialog" }, h("button", { "aria-label": "Close" }, "Close ", h("kbd", { "aria-hidden": "true" }, "Space")))),
    h("div", { class: "pair" }, large(ids[0], told(ids[0])), looking.second === undefined ? null : large(looking.second, told(looking.second))),
    h("p", { class: "question", role: "status" }, question || ""),
    strip,
    buttons || "",
  );
  for (const id of ids.slice(0, 2)) seen.add(id);
  if (!dialog.open) dialog.showModal();
  dialog.focus();
  const chosen = strip.querySelector(".chosen");
  if (chosen) chosen.scrollIntoView({ block: "nearest" });
}

// Whether the end of the images below was in sight; if not, goes on by a page.
function sawTheEnd() {
  const strip = $("look").querySelector(".every");
  if (strip.scrollTop + strip.clientHeight >= strip.scrollHeight - 4) return true;
  strip.scrollBy({ top: strip.clientHeight * 0.9 });
  return false;
}
