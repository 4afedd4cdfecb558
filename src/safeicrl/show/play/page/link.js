// A task as a link: everything after the '#' of the address, so that it never leaves the page.

export function writeLink(state, world) {
  const fields = new URLSearchParams();
  fields.set("world", state.world);
  fields.set("agents", state.panels.map((panel) => panel.agent).join("|"));
  fields.set("budgets", state.panels.map((panel) => panel.budget).join("|"));
  fields.set("seed", state.seed);
  if ("seed" in state.task) fields.set("task", state.task.seed);
  else fields.set("room", writeRoom(state.task, world.scene.size));
  return `#${fields}`;
}

// What a link asks for, or null: it may come from anybody, so nothing in it is taken on trust.
export function readLink(hash, worlds) {
  const fields = new URLSearchParams(hash.replace(/^#/, ""));
  const world = worlds[fields.get("world")];
  if (!Object.hasOwn(worlds, fields.get("world") ?? "")) return null;
  const agents = (fields.get("agents") ?? "").split("|");
  const budgets = (fields.get("budgets") ?? "").split("|").map(Number);
  const [low, high] = world.budgets;
  const known = agents.every((agent) => Object.hasOwn(world.agents, agent));
  const allowed = budgets.every((budget) => budget >= low && budget <= high);
  if (agents.length > 2 || agents.length !== budgets.length || !known || !allowed) return null;
  const seed = readWhole(fields.get("seed"));
  const room = fields.get("room");
  const task = room !== null ? readRoom(room, world.scene) : { seed: readWhole(fields.get("task")) };
  if (seed === null || task === null || task.seed === null) return null;
  const panels = agents.map((agent, index) => ({ agent, budget: budgets[index] }));
  return { world: fields.get("world"), panels, seed, task };
}

// goal cell, then the obstacles as one bit per cell, row by row, four bits per hexadecimal digit
function writeRoom(room, size) {
  const bits = new Array(size * size).fill(0);
  for (const [row, column] of room.obstacles) bits[row * size + column] = 1;
  let digits = "";
  for (let i = 0; i < bits.length; i += 4) {
    digits += parseInt(bits.slice(i, i + 4).join("").padEnd(4, "0"), 2).toString(16);
  }
  return `${room.goal[0] * size + room.goal[1]}.${digits}`;
}

function readRoom(text, scene) {
  if (scene.kind !== "room") return null;
  const cells = scene.size * scene.size;
  const found = /^(\d{1,4})\.([0-9a-f]+)$/.exec(text);
  if (!found || found[2].length !== Math.ceil(cells / 4) || Number(found[1]) >= cells) return null;
  const place = (cell) => [Math.floor(cell / scene.size), cell % scene.size];
  const goal = Number(found[1]);
  const start = scene.start[0] * scene.size + scene.start[1];
  const obstacles = [];
  for (let cell = 0; cell < cells; cell++) {
    if (!((parseInt(found[2][cell >> 2], 16) >> (3 - (cell & 3))) & 1)) continue;
    if (cell === goal || cell === start) return null;
    obstacles.push(place(cell));
  }
  return goal === start ? null : { goal: place(goal), obstacles };
}

function readWhole(text) {
  return /^\d{1,10}$/.test(text ?? "") && Number(text) < 2 ** 32 ? Number(text) : null;
}
