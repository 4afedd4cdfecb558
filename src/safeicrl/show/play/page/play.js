// The page: what the visitor asks for, the connection, and what the server answers.

import { plural } from "./charts.js";
import { readLink, writeLink } from "./link.js";
import { Panel } from "./panel.js";

const SPEEDS = [1, 2, 5, 10, 20, 50, 100, 200]; // steps per second
const QUIET = 2500; // milliseconds between two announcements while it plays
const $ = (id) => document.getElementById(id);
const randomSeed = () => Math.floor(Math.random() * 2 ** 32);

const state = {
  worlds: null,
  world: "",
  task: { seed: 0 }, // or a drawn room
  seed: 0, // of the agents' actions
  panels: [], // {agent, budget}
  changed: true, // since the trial on the server was started
  playing: false,
  finished: false,
  stepping: false, // step by step
};
let views = [];
let trial = -1; // of the server; frames of an older one are late
let socket = null;
let count = 0;
let announcedAt = 0;

// -- talking to the server --

function connect() {
  socket = new WebSocket(`${location.protocol === "https:" ? "wss" : "ws"}://${location.host}/socket`);
  socket.addEventListener("message", (event) => hear(JSON.parse(event.data)));
  socket.addEventListener("close", () => {
    setPlaying(false);
    state.changed = true;
    $("problem").textContent = "The connection is closed. Press Play to connect again.";
  });
}

function send(type, fields = {}) {
  if (socket?.readyState === WebSocket.OPEN) socket.send(JSON.stringify({ type, n: ++count, ...fields }));
}

function hear(message) {
  if (message.type === "hello") meet(message);
  else if (message.type === "error") complain(message);
  else if (message.type === "loading") announce("Loading the agent. The first time, this takes some seconds.");
  else if (message.type === "started") begin(message);
  else if (message.type === "frame") follow(message);
  else if (message.type === "finished") finish();
}

// Several wishes of one kind within a moment, as from a slider that is dragged, are one: the last.
const waiting = new Map();
function sendSoon(key, type, fields) {
  if (!waiting.has(key)) setTimeout(() => {
    const [lastType, lastFields] = waiting.get(key);
    waiting.delete(key);
    send(lastType, lastFields);
  }, 60);
  waiting.set(key, [type, fields]);
}

function follow(frame) {
  if (frame.trial === trial) views.forEach((view, i) => view.show(frame.panels[i]));
}

function complain({ message, stopped = false }) {
  $("problem").textContent = message;
  if (!stopped) return;
  setPlaying(false);
  state.changed = true;
}

function announce(text) {
  $("status").textContent = text;
  announcedAt = performance.now();
}

// -- the course of a visit --

function meet(message) {
  const again = state.worlds !== null;
  count = 0;
  state.worlds = message.worlds;
  $("problem").textContent = "";
  if (again) return start(true);
  $("world").replaceChildren(...Object.entries(state.worlds).map(([name, world]) => new Option(world.title, name)));
  openLink();
}

// Show what the address asks for, or a random task of the first world.
function openLink() {
  const asked = location.hash.length > 1;
  const wanted = asked ? readLink(location.hash, state.worlds) : null;
  if (asked && !wanted) $("problem").textContent = "This link is not valid here; a random task instead.";
  if (wanted) Object.assign(state, wanted);
  else chooseWorld(Object.keys(state.worlds)[0]);
  layOut();
  start();
}

function chooseWorld(name) {
  const world = state.worlds[name];
  const agents = Object.keys(world.agents);
  const first = world.first;
  const [low, high] = world.budgets;
  const budget = Math.min(Math.max(world.scene.kind === "room" ? 3 : Math.round((low + high) / 2), low), high);
  state.world = name;
  state.task = { seed: randomSeed() };
  state.seed = randomSeed();
  const other = agents.find((agent) => agent !== first) ?? first;
  state.panels = Array.from({ length: state.panels.length || 1 }, (_, i) => ({ agent: i ? other : first, budget }));
}

// Begin a trial on the server, with what is chosen now.
function start(thenPlay = false) {
  const { world, task, seed, panels } = state;
  trial = -1;
  state.changed = false;
  state.finished = false;
  setPlaying(false);
  send("speed", { value: SPEEDS[$("speed").value] });
  send("start", { world, task, seed, panels });
  if (thenPlay) resume();
  share();
}

function resume() {
  setPlaying(true);
  send("play");
  announce("Playing.");
}

function begin(message) {
  trial = message.trial;
  if (message.world !== state.world || state.changed) return; // an older wish
  views.forEach((view, i) => view.begin(message.task, message.panels[i] ?? []));
  const { title } = state.worlds[state.world];
  if (!state.playing) announce(`${title}: ready. Press Play, or Step to go step by step.`);
}

function finish() {
  state.finished = true;
  setPlaying(false);
  announce(`The trial is over. ${views.map((view) => view.sentence()).join(" ")}`);
}

function setPlaying(playing) {
  state.playing = playing;
  state.stepping = false;
  $("play").textContent = playing ? "Pause" : "Play";
  $("step").disabled = playing;
}

function share() {
  const hash = writeLink(state, state.worlds[state.world]);
  history.replaceState(null, "", hash);
  $("link").value = location.href;
}

// -- drawing --

// Draw one cell. `paint` is what a dragged pointer goes on with; returned by the first call of a drag.
function drawCell(cell, paint, key) {
  const { scene } = state.worlds[state.world];
  const same = (other) => other[0] === cell[0] && other[1] === cell[1];
  const room = views[0].board.room;
  const tool = key ?? paint?.tool ?? document.querySelector("input[name=tool]:checked").value;
  if (!room) return refuse("Wait until the room is there.");
  if (same(scene.start)) return refuse("The start cell stays free.");
  let { goal, obstacles } = room;
  const there = obstacles.some(same);
  const add = paint ? paint.add : !there;
  if (tool === "goal") {
    goal = cell;
    obstacles = obstacles.filter((other) => !same(other));
  } else if (same(goal)) {
    return refuse("The goal is here: move it first.");
  } else if (add !== there) {
    obstacles = add ? [...obstacles, cell] : obstacles.filter((other) => !same(other));
  }
  changeRoom({ goal, obstacles });
  const what = tool === "goal" ? "goal" : add ? "obstacle" : "free";
  if (!paint) announce(`Row ${cell[0] + 1}, column ${cell[1] + 1}: ${what}. ${plural(obstacles.length, "obstacle")}.`);
  return { tool, add };
}

function refuse(text) {
  announce(text);
  return null;
}

function changeRoom(room) {
  if (state.playing) send("pause");
  setPlaying(false);
  trial = -1;
  state.task = room;
  state.changed = true;
  views.forEach((view) => view.begin(room, []));
  share();
}

// -- the panels --

// The panels anew, for another world or another number of them.
function layOut() {
  const { scene } = state.worlds[state.world];
  $("world").value = state.world;
  $("compare").checked = state.panels.length > 1;
  $("tools").hidden = scene.kind !== "room";
  const quiet = () => performance.now() - announcedAt > QUIET;
  const page = { state, announce, quiet, start, share, sendSoon, drawCell };
  views = state.panels.map((_, index) => new Panel(index, page));
  $("boards").className = views.length > 1 ? "two" : "";
  $("boards").replaceChildren(...views.map((view) => view.root));
}

// -- controls --

function listen() {
  const ready = (action) => () => {
    $("problem").textContent = "";
    if (socket.readyState === WebSocket.CLOSED) connect(); // and go on when the server says hello
    else if (state.worlds) action();
  };
  $("play").addEventListener("click", ready(() => {
    if (state.playing) {
      setPlaying(false);
      send("pause");
      announce("Paused.");
    } else if (state.changed) start(true);
    else {
      if (state.finished) reset();
      resume();
    }
  }));
  $("step").addEventListener("click", ready(() => {
    if (state.changed) start();
    if (state.finished) reset();
    state.stepping = true;
    send("step");
  }));
  $("reset").addEventListener("click", ready(() => {
    if (state.changed) start();
    else reset();
    announce("The agent has forgotten everything.");
  }));
  $("random").addEventListener("click", ready(() => {
    state.task = { seed: randomSeed() };
    state.seed = randomSeed();
    start();
  }));
  $("clear").addEventListener("click", ready(() => {
    const { room } = views[0].board;
    if (room) changeRoom({ goal: room.goal, obstacles: [] });
  }));
  $("world").addEventListener("change", ready(() => {
    chooseWorld($("world").value);
    layOut();
    start();
  }));
  $("compare").addEventListener("change", ready(() => {
    const [first] = state.panels;
    const agents = Object.keys(state.worlds[state.world].agents);
    const other = agents.find((agent) => agent !== first.agent) ?? first.agent;
    state.panels = $("compare").checked ? [first, { agent: other, budget: first.budget }] : [first];
    layOut();
    start();
  }));
  $("speed").addEventListener("input", () => {
    showSpeed();
    sendSoon("speed", "speed", { value: SPEEDS[$("speed").value] });
  });
  $("copy").addEventListener("click", async () => {
    $("link").select();
    try {
      await navigator.clipboard.writeText($("link").value);
      announce("The link is copied.");
    } catch {
      announce("Copy the link from the field.");
    }
  });
  window.addEventListener("hashchange", ready(openLink));
}

function reset() {
  trial = -1;
  state.finished = false;
  setPlaying(false);
  send("reset");
}

function showSpeed() {
  const text = `${plural(SPEEDS[$("speed").value], "step")}/s`;
  $("speed-text").textContent = text;
  $("speed").setAttribute("aria-valuetext", text);
}

listen();
showSpeed();
connect();
