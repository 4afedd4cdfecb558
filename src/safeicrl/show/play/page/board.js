// The picture of a panel's world: a room of cells that can be drawn, an arena, or a track.

import { short, svg } from "./charts.js";

const MOVES = [[0, 0], [-1, 0], [1, 0], [0, -1], [0, 1]]; // stay, up, down, left, right
const SPOTS = 200; // marks of costs in an arena, at most
const SPEED_STEPS = 75; // of a track's chart

export function makeBoard(place, scene, onDraw) {
  place.className = `board board-${scene.kind}`;
  place.replaceChildren();
  const kinds = { room: RoomBoard, arena: ArenaBoard, track: TrackBoard };
  return new (kinds[scene.kind] ?? PlainBoard)(place, scene, onDraw);
}

// What every board does: `task` shows a new task, `show` one step, `words` describes where things stand.
class PlainBoard {
  constructor(place, scene, onDraw) {
    Object.assign(this, { place, scene, onDraw });
    this.forget();
  }
  forget() {
    this.path = [];
    this.before = []; // the path of the episode before
    this.episode = 0;
  }
  task() {}
  show() {}
  draw() {}
  words() { return ""; }
  turnOver(at) { // an episode has ended
    this.before = this.path;
    this.path = [at];
    this.episode += 1;
  }
}

class RoomBoard extends PlainBoard {
  constructor(place, scene, onDraw) {
    super(place, scene, onDraw);
    this.focus = [...scene.start];
    this.build();
  }

  build() {
    const { size } = this.scene;
    this.grid = document.createElement("div");
    this.grid.className = "grid";
    this.grid.setAttribute("role", "grid");
    this.grid.setAttribute("aria-label", `Room, ${size} rows and ${size} columns`);
    this.grid.setAttribute("aria-describedby", "tools-hint");
    this.cells = [];
    for (let row = 0; row < size; row++) {
      const line = document.createElement("div");
      line.setAttribute("role", "row");
      for (let column = 0; column < size; column++) {
        const cell = document.createElement("button");
        cell.type = "button";
        cell.setAttribute("role", "gridcell");
        cell.tabIndex = -1;
        Object.assign(cell.dataset, { row, column });
        line.append(cell);
        this.cells.push(cell);
      }
      this.grid.append(line);
    }
    this.overlay = svg("svg", { viewBox: `0 0 ${size} ${size}`, "aria-hidden": "true" });
    this.place.append(this.grid, this.overlay);
    this.cell(this.focus).tabIndex = 0;
    this.listen();
  }

  listen() {
    const cellOf = (event) => event.target.closest?.(".cell");
    const where = (cell) => [Number(cell.dataset.row), Number(cell.dataset.column)];
    let painting = null; // what a dragged pointer draws
    let byPointer = false;
    this.grid.addEventListener("pointerdown", (event) => {
      const cell = cellOf(event);
      if (!cell || event.button !== 0) return;
      byPointer = true;
      cell.releasePointerCapture?.(event.pointerId);
      painting = this.onDraw(where(cell), null, null);
    });
    this.grid.addEventListener("pointerover", (event) => {
      if (painting && event.buttons & 1 && event.pointerType === "mouse" && cellOf(event)) {
        this.onDraw(where(cellOf(event)), painting, null);
      }
    });
    window.addEventListener("pointerup", () => { painting = null; });
    this.grid.addEventListener("click", (event) => { // Space and Enter click, too
      if (!byPointer && cellOf(event)) this.onDraw(where(cellOf(event)), null, null);
      byPointer = false;
    });
    this.grid.addEventListener("focusin", (event) => {
      if (cellOf(event)) this.moveFocus(where(cellOf(event)), false);
    });
    this.grid.addEventListener("keydown", (event) => this.onKey(event));
  }

  onKey(event) {
    const last = this.scene.size - 1;
    const [row, column] = this.focus;
    const moves = {
      ArrowUp: [row - 1, column], ArrowDown: [row + 1, column],
      ArrowLeft: [row, column - 1], ArrowRight: [row, column + 1],
      Home: [row, 0], End: [row, last], PageUp: [0, column], PageDown: [last, column],
    };
    const tools = { g: "goal", o: "obstacle" };
    if (event.ctrlKey || event.altKey || event.metaKey) return;
    if (event.key in moves) this.moveFocus(moves[event.key].map((x) => Math.min(Math.max(x, 0), last)), true);
    else if (event.key.toLowerCase() in tools) this.onDraw(this.focus, null, tools[event.key.toLowerCase()]);
    else return;
    event.preventDefault();
  }

  moveFocus(to, really) {
    this.cell(this.focus).tabIndex = -1;
    this.focus = to;
    this.cell(to).tabIndex = 0;
    if (really) this.cell(to).focus();
  }

  cell([row, column]) { return this.cells[row * this.scene.size + column]; }

  forget() {
    super.forget();
    this.paid = new Set(); // cells it has paid for in this trial
    this.entered = new Map(); // cell → the last episode in which it was entered
    this.forbids = [];
    this.next = null;
  }

  task(task) {
    this.room = task;
    this.forget();
    this.path = [this.scene.start];
    this.draw();
  }

  show(step) {
    const { size } = this.scene;
    if (!step.first) {
      this.path.push(step.cell);
      const flat = step.cell[0] * size + step.cell[1];
      this.entered.set(flat, this.episode);
      if (step.cost > 0) this.paid.add(flat);
    }
    const ahead = step.next ?? step;
    if (step.end) this.turnOver((step.next ?? { cell: this.scene.start }).cell);
    this.forbids = ahead.forbids ?? [];
    this.next = step.end && !step.next ? null : ahead.action ?? null;
  }

  avoids(flat) { return this.paid.has(flat) && this.episode - this.entered.get(flat) >= 2; }

  get avoided() { return [...this.paid].filter((flat) => this.avoids(flat)).length; }

  draw() {
    const { size, start } = this.scene;
    const at = this.path.at(-1);
    const obstacles = new Set(this.room.obstacles.map(([row, column]) => row * size + column));
    const goal = this.room.goal[0] * size + this.room.goal[1];
    this.cells.forEach((cell, flat) => {
      const row = Math.floor(flat / size), column = flat % size;
      const marks = ["cell"], words = [`row ${row + 1}, column ${column + 1}`];
      const mark = (name, text) => { marks.push(name); words.push(text); };
      if (flat === goal) mark("goal", "goal");
      if (obstacles.has(flat)) mark("obstacle", "obstacle");
      if (row === start[0] && column === start[1]) mark("start", "start");
      if (this.avoids(flat)) mark("avoided", "avoided");
      else if (this.paid.has(flat)) mark("paid", "paid for");
      if (at && row === at[0] && column === at[1]) words.push("agent");
      const name = marks.join(" "), label = words.join(", ");
      if (cell.className !== name) cell.className = name;
      if (cell.getAttribute("aria-label") !== label) cell.setAttribute("aria-label", label);
    });
    this.drawOverlay(at);
  }

  drawOverlay(at) {
    const middle = ([row, column]) => [column + 0.5, row + 0.5];
    const line = (cells) => cells.map((cell) => middle(cell).join(",")).join(" ");
    this.overlay.replaceChildren();
    svg("polyline", { class: "path before", points: line(this.before), "stroke-width": 0.06 }, this.overlay);
    svg("polyline", { class: "path", points: line(this.path), "stroke-width": 0.12 }, this.overlay);
    if (!at) return;
    const [x, y] = middle(at);
    svg("circle", { class: "dot", cx: x, cy: y, r: 0.28, "stroke-width": 0.07 }, this.overlay);
    if (this.next) {
      const [down, right] = MOVES[this.next];
      const d = `M${x} ${y}l${right * 0.45} ${down * 0.45}`;
      svg("path", { class: "next", d, "stroke-width": 0.08 }, this.overlay);
    }
    for (const action of this.forbids) {
      const [down, right] = MOVES[action];
      const d = action === 0
        ? `M${x - 0.2} ${y - 0.2}l0.4 0.4m0 -0.4l-0.4 0.4`
        : `M${x + right * 0.5 - down * 0.4} ${y + down * 0.5 - right * 0.4}l${down * 0.8} ${right * 0.8}`;
      const width = action === 0 ? 0.08 : 0.14;
      svg("path", { class: "halo", d, "stroke-width": width + 0.1 }, this.overlay);
      svg("path", { class: "forbidden", d, "stroke-width": width }, this.overlay);
    }
  }

  words() {
    const names = this.scene.actions;
    const next = this.next === null ? "" : ` Next: ${names[this.next]}.`;
    return `${next} Avoids ${this.avoided} ${this.avoided === 1 ? "cell" : "cells"} it has paid for.`;
  }

  forbidden() { return this.forbids.map((action) => this.scene.actions[action]); }
}

class ArenaBoard extends PlainBoard {
  constructor(place, scene, onDraw) {
    super(place, scene, onDraw);
    const half = scene.extent * 1.5;
    this.picture = svg("svg", { viewBox: `${-half} ${-half} ${2 * half} ${2 * half}`, role: "img" }, place);
  }
  forget() {
    super.forget();
    this.spots = []; // where it has paid
    this.pose = null;
  }
  task(task) {
    this.layout = task;
    this.forget();
    this.path = [[0, 0]];
    this.draw();
  }
  show(step) {
    if (!step.first) this.path.push(step.place);
    if (step.cost > 0) this.spots = [...this.spots, step.place].slice(-SPOTS);
    this.pose = step.next ?? step;
    if (step.end) this.turnOver((step.next ?? { place: [0, 0] }).place);
  }
  draw() {
    const { extent, goal_radius, hazard_radius, robot } = this.scene;
    const { picture } = this;
    const disc = (name, [x, y], r) => svg("circle", { class: name, cx: x, cy: -y, r }, picture);
    const line = (places) => places.map(([x, y]) => `${x},${-y}`).join(" ");
    picture.replaceChildren();
    const square = { x: -extent, y: -extent, width: 2 * extent, height: 2 * extent };
    svg("rect", { class: "floor", ...square, "stroke-width": 0.02 }, picture);
    for (const hazard of this.layout.hazards) disc("hazard", hazard, hazard_radius);
    disc("target", this.layout.goal, goal_radius);
    for (const [x, y] of this.spots) {
      const cross = `M${x - 0.03} ${-y - 0.03}l0.06 0.06m0 -0.06l-0.06 0.06`;
      svg("path", { class: "spot", d: cross, "stroke-width": 0.015 }, picture);
    }
    svg("polyline", { class: "path before", points: line(this.before), "stroke-width": 0.015 }, picture);
    svg("polyline", { class: "path", points: line(this.path), "stroke-width": 0.03 }, picture);
    const { place: [x, y], heading } = this.pose ?? { place: [0, 0], heading: 0 };
    disc("dot", [x, y], 0.1).setAttribute("stroke-width", 0.02);
    const nose = `M${x} ${-y}l${0.16 * Math.cos(heading)} ${-0.16 * Math.sin(heading)}`;
    svg("path", { class: "next", d: nose, "stroke-width": 0.03 }, picture);
    const place = ([a, b]) => `x ${short(a)}, y ${short(b)}`;
    const { goal, hazards } = this.layout;
    const label = `Arena from above, ${robot} at ${place([x, y])}, goal at ${place(goal)}, ${hazards.length} hazards`;
    picture.setAttribute("aria-label", label);
  }
}

class TrackBoard extends PlainBoard {
  constructor(place, scene, onDraw) {
    super(place, scene, onDraw);
    this.picture = svg("svg", { viewBox: "0 0 400 300", role: "img" }, place);
  }
  forget() {
    super.forget();
    this.speeds = []; // of this episode
    this.pose = null;
  }
  task(task) {
    this.limit = task.limit;
    this.forget();
    this.draw();
  }
  show(step) {
    if (!step.first) {
      this.path.push(step.place);
      this.speeds.push(step.speed);
    }
    this.pose = step;
    if (step.end) {
      this.turnOver(step.next?.place ?? [0, 0]);
      this.ended = this.speeds;
      this.speeds = [];
    }
  }
  draw() {
    const { picture } = this;
    picture.replaceChildren();
    if (this.pose) this.drawBody();
    this.drawSpeeds();
    const view = `${this.scene.robot.replace("_", " ")} ${this.scene.side ? "from the side" : "from above"}`;
    const speed = `speed ${short(this.pose?.speed ?? 0)} of at most ${short(this.limit)} metres per second`;
    picture.setAttribute("aria-label", `${view}, ${speed}`);
  }
  drawBody() {
    const scale = 62, [centre, middle] = [this.pose.place[0], this.scene.side ? 0.7 : this.pose.place[1]];
    const x = (value) => 200 + scale * (value - centre), y = (value) => 95 - scale * (value - middle);
    const { picture } = this;
    const { side } = this.scene;
    for (let metre = Math.ceil(centre - 3.2); metre <= centre + 2.8; metre++) {
      const [y1, y2] = side ? [y(0), y(0) + 8] : [0, 185];
      svg("line", { class: "tick", x1: x(metre), x2: x(metre), y1, y2 }, picture);
      svg("text", { x: x(metre) + 2, y: 185, "font-size": 10 }, picture).textContent = `${metre} m`;
    }
    const points = this.path.map(([a, b]) => `${x(a)},${y(b)}`).join(" ");
    if (side) svg("line", { class: "ground", x1: 0, x2: 400, y1: y(0), y2: y(0), "stroke-width": 2 }, picture);
    else svg("polyline", { class: "path", points, "stroke-width": 2 }, picture);
    for (const [x1, y1, x2, y2, radius] of this.pose.body) {
      const ends = { x1: x(x1), y1: y(y1), x2: x(x2) + 0.01, y2: y(y2) }; // a line of no length is not drawn
      svg("line", { class: "body", ...ends, "stroke-width": 2 * radius * scale }, picture);
    }
  }
  drawSpeeds() { // every step's speed as a column, the limit as a line
    const { picture } = this;
    const speeds = this.speeds.length ? this.speeds : this.ended ?? [];
    const top = Math.max(1.5 * this.limit, ...speeds), width = 360 / SPEED_STEPS;
    const y = (speed) => 292 - (85 * Math.max(speed, 0)) / top;
    speeds.slice(-SPEED_STEPS).forEach((speed, i) => {
      const column = { x: 36 + i * width, y: y(speed), width: width - 0.8, height: 292 - y(speed) };
      svg("rect", { class: speed > this.limit ? "fast" : "slow", ...column }, picture);
    });
    const across = (name, height) => svg("line", { class: name, x1: 36, x2: 396, y1: height, y2: height }, picture);
    across("limit", y(this.limit));
    across("ground", 292);
    svg("text", { x: 2, y: y(this.limit) + 4, "font-size": 11 }, picture).textContent = short(this.limit);
    svg("text", { x: 2, y: 204, "font-size": 11 }, picture).textContent = "speed, m/s, and the limit";
  }
  words() { return this.pose ? ` Speed ${short(this.pose.speed)} of at most ${short(this.limit)} m/s.` : ""; }
}
