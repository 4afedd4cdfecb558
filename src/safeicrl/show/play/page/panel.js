// One agent on the page: its choices, its board, its cost against the budget, its curves and numbers.

import { makeBoard } from "./board.js";
import { drawCurve, plural, short } from "./charts.js";

// `page` is what a panel needs of the rest: {state, announce, quiet, start, share, sendSoon, drawCell}.
export class Panel {
  constructor(index, page) {
    this.index = index;
    this.page = page;
    this.root = document.getElementById("panel-form").content.firstElementChild.cloneNode(true);
    this.world = this.page.state.worlds[this.page.state.world];
    this.find("h2").textContent = this.page.state.panels.length > 1 ? `Agent ${index ? "B" : "A"}` : "Agent";
    this.root.setAttribute("aria-label", this.find("h2").textContent);
    this.board = makeBoard(this.find(".board"), this.world.scene, page.drawCell);
    this.fillChoices();
    this.clear();
  }

  get wanted() { return this.page.state.panels[this.index]; }

  find(selector) { return this.root.querySelector(selector); }

  fillChoices() {
    const { wanted } = this;
    const agent = this.find(".agent"), budget = this.find(".budget");
    agent.replaceChildren(...Object.keys(this.world.agents).map((name) => new Option(name, name)));
    agent.value = wanted.agent;
    [budget.min, budget.max] = this.world.budgets;
    budget.step = this.world.unit || 0.1;
    budget.value = wanted.budget;
    const tell = () => {
      this.find(".about").textContent = this.world.agents[wanted.agent].summary;
      this.find(".budget-text").textContent = short(wanted.budget);
    };
    agent.addEventListener("change", () => {
      wanted.agent = agent.value;
      tell();
      this.page.start();
    });
    budget.addEventListener("input", () => {
      wanted.budget = Number(budget.value);
      tell();
      if (this.steps || this.page.state.playing) {
        this.page.sendSoon(`budget ${this.index}`, "budget", { panel: this.index, value: wanted.budget });
      } else { // not yet begun: it holds from the first episode on
        this.page.state.changed = true;
        this.last = null;
        this.drawBar();
      }
    });
    budget.addEventListener("change", () => {
      if (this.steps) this.page.announce(`Budget ${short(wanted.budget)} from the next episode on.`);
      this.page.share();
    });
    tell();
  }

  clear() {
    this.episodes = []; // {return, cost, steps, budget, over}
    this.steps = this.interventions = 0;
    this.last = null;
  }

  begin(task, steps) {
    this.clear();
    this.find("tbody").replaceChildren();
    this.board.task(task);
    this.show(steps);
    this.drawCurves();
    this.drawBar();
  }

  show(steps) {
    let ended = false;
    for (const step of steps) {
      this.board.show(step);
      this.last = step;
      if (!step.first) this.steps += 1;
      if ((step.next ?? step).stepped_in) this.interventions += 1;
      if (step.end) {
        ended = true;
        this.episodes.push(step.end);
        this.addRow(step.end);
      }
    }
    this.board.draw();
    this.drawBar();
    if (ended) this.drawCurves();
    this.say(ended);
  }

  addRow(end) {
    const row = this.find("tbody").insertRow(0);
    row.className = end.over ? "over" : "";
    const cost = `${short(end.cost)}${end.over ? " over" : ""}`;
    const texts = [this.episodes.length, short(end.return), cost, short(end.budget), end.steps];
    for (const text of texts) row.insertCell().textContent = text;
  }

  // Cost of this episode against the budget; the mark stands at the budget, a broken one is striped.
  drawBar() {
    const step = this.last, bar = this.find(".bar");
    const budget = step?.budget ?? this.wanted.budget;
    const spent = step?.first || !step ? 0 : step.spent;
    const top = Math.max(1.25 * budget, spent, 1), over = spent > budget + 1e-6;
    this.find(".fill").style.width = `${(100 * spent) / top}%`;
    this.find(".mark").style.left = `${(100 * budget) / top}%`;
    bar.classList.toggle("over", over);
    bar.setAttribute("aria-valuenow", spent);
    bar.setAttribute("aria-valuemax", top);
    bar.setAttribute("aria-valuetext", `${short(spent)} of ${short(budget)}`);
    this.find(".spent").textContent = `Cost ${short(spent)} of ${short(budget)}${over ? ": over budget" : ""}.`;
    const episode = Math.min(this.episodes.length + (step?.end ? 0 : 1), this.world.episodes);
    const { episodes, steps } = this.world;
    const now = `Episode ${episode} of ${episodes}, step ${step?.time ?? 0} of ${steps}.`;
    this.find(".now").textContent = step ? now + this.board.words() : now;
    this.find(".guard").textContent = this.guardText(step);
    this.find(".totals").textContent = this.sentence();
  }

  guardText(step) {
    if (!this.world.agents[this.wanted.agent].guard) return "";
    const ahead = step?.next ?? step;
    const moves = this.board.forbidden?.() ?? [];
    const risk = ahead?.risk === undefined ? "" : ` Risk of the next move: ${short(100 * ahead.risk)}%.`;
    const forbids = moves.length ? moves.join(", ") : "nothing";
    return `Guard: forbids ${forbids}.${risk} It replaced ${plural(this.interventions, "move")}.`;
  }

  drawCurves() {
    const { episodes } = this.world;
    const column = (name) => this.episodes.map((end) => end[name]);
    drawCurve(this.find(".returns"), { values: column("return"), episodes, label: "Return per episode" });
    drawCurve(this.find(".costs"), {
      values: column("cost"), episodes, label: "Cost per episode", budgets: column("budget"), over: column("over"),
      budget: this.episodes.length < episodes ? this.wanted.budget : null,
    });
  }

  sentence() {
    const total = this.episodes.reduce((sum, end) => sum + end.return, 0);
    const over = this.episodes.filter((end) => end.over).length;
    const who = this.page.state.panels.length > 1 ? `Agent ${this.index ? "B" : "A"}: ` : "";
    return `${who}${plural(this.episodes.length, "episode")}, total return ${short(total)}, ${over} over budget.`;
  }

  say(ended) {
    if (this.index || !this.last || this.last.first) return;
    const { last } = this;
    if (this.page.state.stepping) {
      const cost = `cost ${short(last.cost)}, ${short(last.spent)} of ${short(last.budget)} spent.`;
      const over = last.end ? " The episode is over." : "";
      this.page.announce(`Step ${last.time}: ${cost}${over}${this.board.words()}`);
    } else if (ended && this.page.quiet()) {
      const end = this.episodes.at(-1);
      const cost = `cost ${short(end.cost)} of ${short(end.budget)}`;
      this.page.announce(`Episode ${this.episodes.length}: return ${short(end.return)}, ${cost}.`);
    }
  }
}
