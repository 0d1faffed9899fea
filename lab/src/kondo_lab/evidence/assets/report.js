"use strict";
// The quality-cost frontier and the figure viewer. No library.

const CHOICES = JSON.parse(document.getElementById("frontier-data").textContent);
const MAX_RATIO = 20;
const $ = (id) => document.getElementById(id);

// ---- What the numbers say ----

const cost = (point, c) => point.forward + c * point.backward;

// A mean over the seeds that reached the target flatters a series that some seeds never got there.
const ranked = (point) => point.seeds > 0 && point.reached === point.seeds
  && point.forward !== null && point.backward !== null;

function analyse(choice, c) {
  const reference = choice.points.find((point) => point.series === "PG" && ranked(point));
  const rows = choice.points.map((point) => {
    const known = point.reached > 0 && point.forward !== null && point.backward !== null;
    const total = known ? cost(point, c) : null;
    const speedup = ranked(point) && reference ? cost(reference, c) / total : null;
    return { ...point, total, speedup, ranked: ranked(point) };
  });
  const candidates = rows.filter((row) => row.ranked);
  const error = (row) => row.final_error ?? Infinity;
  const dominates = (a, b) => a.total <= b.total && error(a) <= error(b)
    && (a.total < b.total || error(a) < error(b));
  for (const row of rows) {
    row.pareto = row.ranked && !candidates.some((other) => dominates(other, row));
  }
  candidates.sort((a, b) => a.total - b.total || error(a) - error(b));
  return { rows, reference, winner: candidates[0] ?? null };
}

function sentence({ rows, reference, winner }, choice, c) {
  const at = `At c = ${c}`;
  if (!winner) {
    return `No series reached ${choice.target} in every seed: there is nothing to rank.`;
  }
  if (winner.series === "PG") {
    return `${at} nothing reaches ${choice.target} at less cost than PG.`;
  }
  if (reference) {
    const speedup = formatSpeedup(winner.speedup);
    return `${at} ${winner.series} reaches ${choice.target} at ${speedup} less cost than PG.`;
  }
  const pg = rows.find((row) => row.series === "PG");
  const why = pg ? `PG reached it in ${pg.reached} of ${pg.seeds} seeds` : "PG was not run";
  return `${at} ${winner.series} reaches ${choice.target} at the least cost; ${why}, `
    + "so there is no ratio to it.";
}

// Which series wins where, along the whole slider.
function winnerRanges(choice) {
  const ranges = [];
  for (let tenth = 0; tenth <= 10 * MAX_RATIO; tenth += 1) {
    const series = analyse(choice, tenth / 10).winner?.series;
    if (series === undefined) return "";
    if (ranges.at(-1)?.series !== series) ranges.push({ series, from: tenth / 10 });
  }
  const later = ranges.slice(1).map(({ series, from }) => `${series} from c = ${from}`);
  const [first] = ranges;
  return later.length
    ? `Cheapest from c = 0 to ${MAX_RATIO}: first ${first.series}, then ${later.join(", then ")}.`
    : `${first.series} is cheapest at every c from 0 to ${MAX_RATIO}.`;
}

// ---- Words ----

const NONE = "–";
const formatSpeedup = (value) => `${value.toFixed(value < 2 ? 2 : 1)}x`;
const formatCount = (value) => Math.round(value).toLocaleString("en-US");
const formatError = (value) => (value === 0 ? "0" : String(Number(value.toPrecision(3))));
const formatRate = (value) => `${Number((100 * value).toPrecision(3))}%`;
const or = (format) => (value) => (value === null ? NONE : format(value));

const COLUMNS = [
  { key: "series", title: "series", format: String },
  { key: "rate", title: "rate", format: or(formatRate) },
  { key: "total", title: "total cost", format: or(formatCount) },
  { key: "speedup", title: "speed-up over PG", format: or(formatSpeedup), best: "largest" },
  { key: "final_error", title: "final error", format: or(formatError) },
  { key: "forward", title: "forward", format: or(formatCount) },
  { key: "backward", title: "backward", format: or(formatCount) },
  { key: "reached", title: "reached", format: (value, row) => `${value} of ${row.seeds} seeds` },
];

// ---- Table ----

const sorting = { key: "total", direction: 1 };

function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

// Numbers by size, words by alphabet; what is missing stands last in both directions.
function compare(a, b) {
  const [x, y] = [a[sorting.key], b[sorting.key]];
  if (x === null || y === null) return (x === null) - (y === null);
  const order = typeof x === "string" ? x.localeCompare(y, "en", { numeric: true }) : x - y;
  return sorting.direction * order;
}

// Unranked rows stay below where the order is a ranking.
function sorted(rows) {
  const ranking = ["total", "speedup"].includes(sorting.key);
  return [...rows].sort((a, b) => (ranking ? b.ranked - a.ranked : 0) || compare(a, b));
}

function header(column) {
  const attributes = { scope: "col" };
  if (sorting.key === column.key) {
    attributes["aria-sort"] = sorting.direction > 0 ? "ascending" : "descending";
  }
  const button = element("button", { type: "button", "data-key": column.key }, column.title);
  return element("th", attributes, button);
}

function sortBy(key) {
  const fresh = COLUMNS.find((column) => column.key === key).best === "largest" ? -1 : 1;
  sorting.direction = sorting.key === key ? -sorting.direction : fresh;
  sorting.key = key;
  $("frontier-table").tHead.rows[0].replaceChildren(...COLUMNS.map(header));
  $("frontier-table").querySelector(`[data-key=${key}]`).focus();
  update();
}

const kind = (row, winner) => {
  if (row === winner) return "winner";
  if (!row.ranked) return "partial";
  return row.pareto ? "pareto" : "plain";
};
const MARKS = { winner: "wins", pareto: "Pareto", partial: "not ranked", plain: "" };

function fillTable({ rows, winner }) {
  const lines = sorted(rows).map((row) => {
    const type = kind(row, winner);
    const [name, ...others] = COLUMNS.map((column) => column.format(row[column.key], row));
    const mark = MARKS[type] ? [element("span", { class: "mark" }, MARKS[type])] : [];
    return element("tr", { class: type }, element("th", { scope: "row" }, name, ...mark),
      ...others.map((text) => element("td", {}, text)));
  });
  $("frontier-table").tBodies[0].replaceChildren(...lines);
}

// ---- Chart ----

function svg(name, attributes = {}, ...children) {
  const made = document.createElementNS($("chart").namespaceURI, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

// A log axis over `values`, at least a factor of two wide.
function logAxis(values, from, to) {
  let [low, high] = [Math.min(...values) / 1.15, Math.max(...values) * 1.15];
  const widen = Math.sqrt(Math.max(1, 2.5 / (high / low)));
  [low, high] = [low / widen, high * widen];
  const place = (value) => from + (to - from) * Math.log(value / low) / Math.log(high / low);
  return { place, ticks: logTicks(low, high) };
}

// The finest of these grids that does not crowd.
function logTicks(low, high) {
  const grids = [[1, 1.5, 2, 3, 5, 7], [1, 2, 5], [1, 3], [1]].map((steps) => {
    const ticks = [];
    for (let power = Math.floor(Math.log10(low)); 10 ** power <= high; power += 1) {
      ticks.push(...steps.map((step) => Number((step * 10 ** power).toPrecision(2))));
    }
    return ticks.filter((tick) => tick >= low && tick <= high);
  });
  return grids.find((ticks) => ticks.length <= 7) ?? grids.at(-1);
}

const compact = new Intl.NumberFormat("en-US", { notation: "compact" });

function drawChart(choice, result, c) {
  const picture = $("chart");
  const width = Math.max(280, picture.parentElement.clientWidth);
  const height = Math.round(Math.min(460, Math.max(320, 0.55 * width)));
  const box = { left: 52, right: width - 14, top: 14, bottom: height - 46 };
  const { rows, reference, winner } = result;
  const relative = (row, ratio) => cost(row, ratio) / (reference ? cost(reference, ratio) : 1);
  const shown = rows.filter((row) => row.total !== null && row.final_error !== null);
  picture.setAttribute("viewBox", `0 0 ${width} ${height}`);
  picture.replaceChildren();
  if (!shown.length) return;

  // Between c = 0 and the largest c a relative cost only rises or only falls: the axis stays still.
  const costs = shown.flatMap((row) => [relative(row, 0), relative(row, MAX_RATIO)]);
  const positive = shown.map((row) => row.final_error).filter((error) => error > 0);
  const smallest = positive.length ? Math.min(...positive) : 0.01;
  // A log axis has no zero: it gets a line of its own below the smallest error.
  const zero = shown.some((row) => row.final_error === 0) ? smallest / 3 : null;
  const x = logAxis(costs, box.left, box.right);
  const y = logAxis(positive.concat(zero ?? [], positive.length ? [] : smallest), box.bottom, box.top);
  picture.append(axes(x, y, box, zero, reference));

  const points = shown.map((row) => ({ row, type: kind(row, winner),
    x: x.place(relative(row, c)), y: y.place(row.final_error || zero) }));
  const front = points.filter((point) => point.row.pareto).sort((a, b) => a.x - b.x);
  picture.append(svg("path", { class: "front",
    d: front.map((p, i) => (i ? `H${p.x}V${p.y}` : `M${p.x} ${p.y}`)).join("") }));
  label(points, box, picture);
}

function axes(x, y, box, zero, reference) {
  const group = svg("g", { class: "axis" });
  const unit = reference ? "x" : "";
  for (const tick of x.ticks) {
    const at = x.place(tick);
    group.append(svg("line", { x1: at, x2: at, y1: box.top, y2: box.bottom,
      class: reference && tick === 1 ? "reference" : "" }));
    const name = reference ? String(tick) : compact.format(tick);
    group.append(svg("text", { x: at, y: box.bottom + 17, "text-anchor": "middle" }, name + unit));
  }
  const levels = y.ticks.filter((tick) => zero === null || tick > 1.7 * zero)
    .map((tick) => [y.place(tick), String(tick)]);
  if (zero !== null) levels.push([y.place(zero), "0"]);
  for (const [at, name] of levels) {
    group.append(svg("line", { x1: box.left, x2: box.right, y1: at, y2: at }));
    group.append(svg("text", { x: box.left - 6, y: at + 4, "text-anchor": "end" }, name));
  }
  const title = reference ? "total cost to target, relative to PG" : "total cost to target";
  group.append(svg("text", { x: (box.left + box.right) / 2, y: box.bottom + 38,
    "text-anchor": "middle" }, `${title} (log)`));
  const middle = (box.top + box.bottom) / 2;
  group.append(svg("text", { x: 12, y: middle, transform: `rotate(-90 12 ${middle})`,
    "text-anchor": "middle" }, "final error (log)"));
  return group;
}

const overlap = (a, b) => a.x < b.x + b.width && b.x < a.x + a.width
  && a.y < b.y + b.height && b.y < a.y + a.height;

// Each label takes the nearest free place around its point; the most important ones choose first.
function label(points, box, picture) {
  const taken = points.map(({ x, y }) => ({ x: x - 6, y: y - 6, width: 12, height: 12 }));
  const rank = { winner: 0, pareto: 1, plain: 2, partial: 3 };
  const ordered = [...points].sort((a, b) => rank[a.type] - rank[b.type]);
  const groups = ordered.map(({ row, type, x, y }) => {
    const share = type === "partial" ? ` (${row.reached}/${row.seeds} seeds)` : "";
    const text = svg("text", {}, row.series + share);
    const group = svg("g", { class: `point ${type}`, "data-series": row.series }, text);
    picture.append(group);
    const place = freePlace(x, y, text.getComputedTextLength(), box, taken);
    taken.push(place);
    text.setAttribute("x", place.x);
    text.setAttribute("y", place.y + 11);
    if (place.distance > 14) {
      const end = Math.min(Math.max(x, place.x), place.x + place.width);
      group.prepend(svg("line", { class: "leader", x1: x, y1: y, x2: end,
        y2: place.y > y ? place.y : place.y + place.height }));
    }
    group.append(svg("circle", { cx: x, cy: y, r: type === "winner" ? 7 : 5 }));
    return group;
  });
  // Important points lie on top of others.
  picture.append(...groups.reverse());
}

function freePlace(x, y, width, box, taken) {
  const height = 14;
  let last = null;
  for (let distance = 9; distance <= 90; distance += 5) {
    const corners = [[x + distance, y - 7], [x - distance - width, y - 7],
      [x - width / 2, y - distance - height], [x - width / 2, y + distance],
      [x + distance, y - distance - 7], [x - distance - width, y - distance - 7],
      [x + distance, y + distance - 7], [x - distance - width, y + distance - 7]];
    for (const [left, top] of corners) {
      const place = { x: left, y: top, width, height, distance };
      const inside = left >= box.left && left + width <= box.right
        && top >= box.top && top + height <= box.bottom;
      if (inside && !taken.some((other) => overlap(place, other))) return place;
      last ??= inside ? place : null;
    }
  }
  return last ?? { x: Math.max(box.left, Math.min(x, box.right - width)), y, width, height,
    distance: 0 };
}

// ---- Controls ----

function update() {
  const c = Number($("ratio").value);
  const choice = CHOICES[Number($("choice").value)];
  const result = analyse(choice, c);
  $("ratio-value").textContent = String(c);
  $("sentence").textContent = sentence(result, choice, c);
  $("ranges").textContent = winnerRanges(choice)
    + (choice.small ? " From a small run: the numbers mean little." : "");
  fillTable(result);
  drawChart(choice, result, c);
}

function startFrontier() {
  $("choice").replaceChildren(...CHOICES.map((choice, i) => element("option", { value: i },
    `${choice.task}: ${choice.target} (${choice.study}${choice.small ? ", small run" : ""})`)));
  $("frontier-table").tHead.rows[0].replaceChildren(...COLUMNS.map(header));
  $("frontier-table").tHead.addEventListener("click", (event) => {
    const button = event.target.closest("button");
    if (button) sortBy(button.dataset.key);
  });
  $("ratio").addEventListener("input", update);
  $("choice").addEventListener("change", update);
  $("frontier-app").hidden = false;
  let width = 0;
  new ResizeObserver(([entry]) => {
    if (entry.contentRect.width !== width) {
      width = entry.contentRect.width;
      update();
    }
  }).observe($("chart").parentElement);
  update();
}

// Without script a figure is an image; with it, a button that shows it as large as the window.
function startViewer() {
  for (const plate of document.querySelectorAll(".plate")) {
    const image = plate.querySelector("img");
    const button = element("button", { type: "button", class: "enlarge",
      "aria-label": `Enlarge: ${image.alt}` });
    plate.append(button);
    button.append(image);
  }
  document.querySelector("main").addEventListener("click", (event) => {
    const image = event.target.closest(".enlarge")?.querySelector("img");
    if (!image) return;
    const copy = image.cloneNode();
    copy.loading = "eager";
    $("viewer").querySelector(".stage").replaceChildren(copy);
    $("viewer").showModal();
  });
  $("viewer").addEventListener("click", (event) => {
    if (event.target === $("viewer")) $("viewer").close();
  });
}

if (CHOICES.length) startFrontier();
startViewer();
