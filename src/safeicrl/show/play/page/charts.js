// Small curves over the episodes of a trial.

export function svg(name, attributes = {}, parent = null) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  parent?.append(element);
  return element;
}

export const short = (number) => {
  const scale = Math.abs(number) >= 100 ? 1 : 100;
  return String(Math.round(number * scale) / scale);
};

export const plural = (count, word) => `${count} ${word}${count === 1 ? "" : "s"}`;

const WIDE = 320, HIGH = 96, LEFT = 38, BOTTOM = 16, TOP = 6;

// `values`: one per finished episode. `budgets`, where given: the line to stay under, and which points are over it.
export function drawCurve(place, { values, episodes, label, budgets = null, over = null, budget = null }) {
  const all = [0, ...values, ...(budgets ?? []), ...(budget === null ? [] : [budget])];
  const low = Math.min(...all), high = Math.max(...all, low + 1e-9, low === 0 && Math.max(...all) === 0 ? 1 : low);
  const x = (episode) => LEFT + ((WIDE - LEFT - 6) * episode) / Math.max(episodes - 1, 1);
  const y = (value) => TOP + (HIGH - TOP - BOTTOM) * (1 - (value - low) / (high - low));
  const picture = svg("svg", { viewBox: `0 0 ${WIDE} ${HIGH}`, role: "img" });
  picture.setAttribute("aria-label", describe(label, values, over));
  for (const value of [low, high]) {
    svg("line", { class: "axis", x1: LEFT, x2: WIDE - 6, y1: y(value), y2: y(value) }, picture);
    write(picture, short(value), { x: LEFT - 4, y: y(value) + 4, "text-anchor": "end" });
  }
  for (const episode of [0, episodes - 1]) {
    const anchor = episode ? "end" : "start";
    write(picture, episode + 1, { x: x(episode), y: HIGH - 2, "text-anchor": anchor });
  }
  if (budgets) {
    const ahead = budget === null ? [] : new Array(episodes - budgets.length).fill(budget);
    const steps = [...budgets, ...ahead].map((value, i) => `${x(i - 0.5)},${y(value)} ${x(i + 0.5)},${y(value)}`);
    svg("polyline", { class: "budget-line", points: steps.join(" ") }, picture);
  }
  svg("polyline", { class: "curve", points: values.map((value, i) => `${x(i)},${y(value)}`).join(" ") }, picture);
  values.forEach((value, i) => {
    if (over?.[i]) svg("path", { class: "over", d: `M${x(i)} ${y(value) - 5}l5 8h-10z` }, picture);
    else svg("circle", { class: "point", cx: x(i), cy: y(value), r: 2.2 }, picture);
  });
  place.replaceChildren(picture);
}

function write(picture, text, attributes) {
  svg("text", { "font-size": 9.5, ...attributes }, picture).textContent = text;
}

function describe(label, values, over) {
  if (!values.length) return `${label}: no episode has ended yet`;
  const broken = over ? `, ${over.filter(Boolean).length} over budget` : "";
  return `${label}: ${values.length} episodes, first ${short(values[0])}, last ${short(values.at(-1))}${broken}`;
}
