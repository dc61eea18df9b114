// Draws one iteration of all ranks on a canvas; what `timeline.py` has written is read from the page itself.
(function () {
  "use strict";

  const AXIS = 24, GUTTER = 196, RANK_GAP = 8, LEAST_TICKS = 20, FACTOR = 1.6;
  const data = JSON.parse(document.getElementById("timeline-data").textContent);
  const frame = document.getElementById("timeline");
  const canvas = frame.querySelector("canvas"), room = frame.querySelector(".room");
  const tip = document.getElementById("timeline-tip");
  const choice = document.getElementById("timeline-iteration");
  const showsPath = document.getElementById("timeline-path");
  const pen = canvas.getContext("2d");
  const dark = matchMedia("(prefers-color-scheme: dark)");
  let shown, view, hover = null, drag = null, wanted = false, width = 0, height = 0;

  // ── data ──────────────────────────────────────────────────────────────────────────────────────────────────────

  function boxesOf(flat, stride) {
    const found = [];
    let now = 0;
    for (let at = 0; at < flat.length; at += stride) {
      const begin = now + flat[at], end = begin + flat[at + 1];
      found.push({
        begin, end, kind: flat[at + 2], name: data.names[flat[at + 3]] || data.kinds[flat[at + 2]][0],
        bytes: stride > 4 ? flat[at + 4] : 0, queued: stride > 4 ? flat[at + 5] : 0, unit: stride > 4,
      });
      now = end;
    }
    return found;
  }

  function choose(index) {
    const iteration = data.iterations[index];
    const ranks = new Set(iteration.lanes.map((lane) => lane.rank)).size;
    const [thick, thin] = ranks > 16 ? [9, 5] : ranks > 4 ? [13, 8] : [20, 13];
    let y = AXIS + 6, before = null;
    const lanes = iteration.lanes.map((lane) => {
      const first = lane.rank !== before;
      if (first && before !== null) y += RANK_GAP;
      before = lane.rank;
      const made = {
        rank: lane.rank, name: lane.name, first, y, height: first ? thick : thin,
        under: boxesOf(lane.under, 4),
        boxes: lane.units ? boxesOf(lane.units, 6) : boxesOf(lane.boxes, 4),
      };
      y += made.height + 2;
      return made;
    });
    shown = { lanes, path: iteration.path, ticks: iteration.ticks, bottom: y + 8, ranks };
    room.style.height = shown.bottom + "px";
    hover = null;
    whole();
  }

  // ── view ──────────────────────────────────────────────────────────────────────────────────────────────────────

  function whole() {
    view = { from: 0, to: shown.ticks };
    draw();
  }

  function look(from, to) {
    const span = Math.min(Math.max(to - from, LEAST_TICKS), shown.ticks);
    from = Math.min(Math.max(from + (to - from - span) / 2, 0), shown.ticks - span);
    view = { from, to: from + span };
    draw();
  }

  function zoom(factor, at) {
    const fixed = at === undefined ? (view.from + view.to) / 2 : at;
    const span = Math.min(Math.max((view.to - view.from) / factor, LEAST_TICKS), shown.ticks);
    const from = fixed - ((fixed - view.from) / (view.to - view.from)) * span;
    look(from, from + span);
  }

  function pan(share) {
    const step = share * (view.to - view.from);
    look(view.from + step, view.to + step);
  }

  const across = (tick) => GUTTER + ((tick - view.from) / (view.to - view.from)) * (width - GUTTER - 8);
  const tickAt = (x) => view.from + ((x - GUTTER) / (width - GUTTER - 8)) * (view.to - view.from);

  // ── drawing ───────────────────────────────────────────────────────────────────────────────────────────────────

  function draw() {
    if (!wanted) {
      wanted = true;
      requestAnimationFrame(paint);
    }
  }

  function paint() {
    wanted = false;
    const ratio = window.devicePixelRatio || 1;
    width = frame.clientWidth;
    height = Math.min(frame.clientHeight, shown.bottom);
    if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
      canvas.width = Math.round(width * ratio);
      canvas.height = Math.round(height * ratio);
      canvas.style.width = width + "px";
      canvas.style.height = height + "px";
    }
    const ink = dark.matches ? "#d8dce2" : "#222", faint = dark.matches ? "#33373d" : "#e2e4e7";
    const ground = dark.matches ? "#16181b" : "#fff";
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.fillStyle = ground;
    pen.fillRect(0, 0, width, height);
    const top = frame.scrollTop, marks = ticks();
    pen.fillStyle = faint;
    for (const [tick] of marks) pen.fillRect(across(tick), AXIS, 1, height);
    pen.save();
    pen.beginPath();
    pen.rect(GUTTER, AXIS, width - GUTTER, height - AXIS);
    pen.clip();
    for (const lane of shown.lanes) {
      const y = lane.y - top;
      if (y + lane.height < AXIS || y > height) continue;
      paintBoxes(lane.under, y, lane.height, 0.3, lane.boxes.length === 0);
      paintQueues(lane, y, ink);
      paintBoxes(lane.boxes, y, lane.height, 1, true);
    }
    if (showsPath && showsPath.checked) paintPath(top, ink, ground);
    if (hover) {
      const x = across(hover.box.begin);
      pen.strokeStyle = ink;
      pen.lineWidth = 1.5;
      pen.strokeRect(x, hover.lane.y - top, Math.max(1, across(hover.box.end) - x), hover.lane.height);
    }
    pen.restore();
    paintLabels(top, ink, ground);
    paintAxis(marks, ink, ground, faint);
  }

  function paintBoxes(boxes, y, tall, opacity, labelled) {
    let free = -1;
    pen.font = Math.min(11, tall - 2) + "px system-ui, sans-serif";
    pen.textBaseline = "middle";
    for (let at = firstIn(boxes); at < boxes.length && boxes[at].begin <= view.to; at++) {
      const one = boxes[at];
      const left = Math.max(across(one.begin), GUTTER - 1), right = Math.min(across(one.end), width);
      if (right <= free) continue; // narrower than a pixel, and there is a box already
      pen.globalAlpha = opacity;
      pen.fillStyle = data.kinds[one.kind][1];
      const wide = Math.max(right - left - (right - left > 3 ? 0.7 : 0), 0.8);
      pen.fillRect(left, y, wide, tall);
      free = left + Math.max(wide, 0.5);
      if (labelled && wide > 46 && tall >= 12) {
        pen.globalAlpha = 1;
        pen.fillStyle = opacity < 1 ? (dark.matches ? "#d8dce2" : "#222") : "#fff";
        if (opacity === 1 && light(data.kinds[one.kind][1])) pen.fillStyle = "#111";
        text(one.name, left + 4, y + tall / 2 + 0.5, wide - 6);
      }
    }
    pen.globalAlpha = 1;
  }

  function paintQueues(lane, y, ink) {
    pen.fillStyle = ink;
    pen.globalAlpha = 0.35;
    for (const one of lane.boxes) {
      if (!one.queued || one.begin < view.from || one.begin - one.queued > view.to) continue;
      const left = Math.max(across(one.begin - one.queued), GUTTER);
      pen.fillRect(left, y + lane.height - 2, across(one.begin) - left, 2);
    }
    pen.globalAlpha = 1;
  }

  function paintPath(top, ink, ground) {
    for (const [color, thick] of [[ground, 5], [ink, 2.2]]) {
      pen.strokeStyle = color;
      pen.lineWidth = thick;
      pen.lineJoin = "round";
      pen.beginPath();
      let on = false;
      for (const [begin, end, place] of shown.path) {
        const lane = shown.lanes[place], y = lane.y - top + lane.height - 1.5;
        const left = Math.max(Math.min(across(begin), 1e5), -1e5), right = Math.max(Math.min(across(end), 1e5), -1e5);
        if (on) pen.lineTo(left, y);
        else pen.moveTo(left, y);
        pen.lineTo(right, y);
        on = true;
      }
      pen.stroke();
    }
  }

  function paintLabels(top, ink, ground) {
    pen.fillStyle = ground;
    pen.fillRect(0, AXIS, GUTTER - 2, height - AXIS);
    pen.textBaseline = "middle";
    for (const lane of shown.lanes) {
      const y = lane.y - top + lane.height / 2;
      if (y < AXIS - 4 || y > height + 4) continue;
      pen.fillStyle = ink;
      if (lane.first) {
        pen.font = "bold 11px system-ui, sans-serif";
        text("rank " + lane.rank, 4, y, 62);
      }
      if (shown.ranks <= 16 || lane.first) {
        pen.font = Math.min(11, lane.height + 2) + "px system-ui, sans-serif";
        pen.globalAlpha = 0.75;
        text(shown.ranks <= 16 ? lane.name : data.hosts[lane.rank] || "", 70, y, GUTTER - 76);
        pen.globalAlpha = 1;
      }
    }
  }

  function paintAxis(marks, ink, ground, faint) {
    pen.fillStyle = ground;
    pen.fillRect(0, 0, width, AXIS);
    pen.fillStyle = faint;
    pen.fillRect(GUTTER, AXIS - 1, width, 1);
    pen.fillStyle = ink;
    pen.font = "11px system-ui, sans-serif";
    pen.textBaseline = "middle";
    for (const [tick, label] of marks) {
      const x = across(tick);
      if (x < width - 48) pen.fillText(label, x + 3, AXIS / 2);
    }
  }

  function ticks() {
    const span = (view.to - view.from) / data.ticks_per_ms, about = span / Math.max(2, (width - GUTTER) / 110);
    const power = Math.pow(10, Math.floor(Math.log10(about)));
    const step = [1, 2, 5, 10].map((m) => m * power).find((value) => value >= about);
    const digits = Math.max(0, Math.ceil(-Math.log10(step) - 1e-9)), found = [];
    for (let at = Math.ceil(view.from / data.ticks_per_ms / step); at * step * data.ticks_per_ms <= view.to; at++) {
      found.push([at * step * data.ticks_per_ms, (at * step).toFixed(digits) + " ms"]);
    }
    return found;
  }

  function text(words, x, y, room) {
    if (pen.measureText(words).width > room) {
      let fits = Math.max(0, Math.floor((words.length * room) / pen.measureText(words).width));
      while (fits > 0 && pen.measureText(words.slice(0, fits) + "…").width > room) fits--;
      if (fits < 2) return;
      words = words.slice(0, fits) + "…";
    }
    pen.fillText(words, x, y);
  }

  function light(color) {
    const [red, green, blue] = [1, 3, 5].map((at) => parseInt(color.slice(at, at + 2), 16));
    return 0.3 * red + 0.59 * green + 0.11 * blue > 140;
  }

  function firstIn(boxes) {
    let low = 0, high = boxes.length; // those of a lane follow each other
    while (low < high) {
      const middle = (low + high) >> 1;
      if (boxes[middle].end < view.from) low = middle + 1;
      else high = middle;
    }
    return low;
  }

  // ── what is under the pointer ─────────────────────────────────────────────────────────────────────────────────

  function boxAt(x, y) {
    const lane = shown.lanes.find((one) => y >= one.y && y < one.y + one.height + 1);
    if (!lane || x < GUTTER) return null;
    const near = (boxes) => {
      let best = null, least = 2.5;
      for (let at = firstIn(boxes); at < boxes.length && across(boxes[at].begin) <= x + 3; at++) {
        const one = boxes[at], away = Math.max(across(one.begin) - x, x - across(one.end), 0);
        if (away < least) [best, least] = [one, away];
        if (away === 0) break;
      }
      return best;
    };
    const box = near(lane.boxes) || near(lane.under);
    return box && { lane, box, under: !lane.boxes.includes(box) };
  }

  function tell(event) {
    if (!hover) {
      tip.hidden = true;
      return;
    }
    const { lane, box, under } = hover, ms = (count) => (count / data.ticks_per_ms).toFixed(4) + " ms";
    const kind = data.kinds[box.kind][0];
    const lines = [
      box.name + (under && lane.boxes.length ? " (between operators)" : ""),
      "rank " + lane.rank + ", " + lane.name + (kind === box.name ? "" : ": " + kind),
      "begins at " + ms(box.begin) + ", lasts " + ms(box.end - box.begin),
    ];
    if (box.unit) {
      const seconds = (box.end - box.begin) / data.ticks_per_ms / 1e3;
      lines.push(box.bytes.toLocaleString("en") + " bytes" +
        (seconds > 0 ? ", " + ((8 * box.bytes) / seconds / 1e9).toPrecision(3) + " Gbit/s of gradients" : ""));
      if (box.queued) lines.push("waited " + ms(box.queued) + " for other ranks or its stream");
    }
    tip.textContent = lines.join("\n");
    tip.hidden = false;
    const edge = document.documentElement.clientWidth - tip.offsetWidth - 8;
    tip.style.left = Math.max(4, Math.min(event.clientX + 14, edge)) + "px";
    const below = event.clientY + 18;
    const fits = below + tip.offsetHeight < window.innerHeight;
    tip.style.top = (fits ? below : event.clientY - tip.offsetHeight - 12) + "px";
  }

  const place = (event) => {
    const box = canvas.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  };

  // ── mouse and keyboard ────────────────────────────────────────────────────────────────────────────────────────

  canvas.addEventListener("pointerdown", (event) => {
    if (event.button !== 0) return;
    drag = { x: event.clientX, y: event.clientY, from: view.from, to: view.to, top: frame.scrollTop };
    canvas.setPointerCapture(event.pointerId);
    canvas.focus({ preventScroll: true });
  });
  canvas.addEventListener("pointermove", (event) => {
    if (drag) {
      const step = ((drag.x - event.clientX) / (width - GUTTER - 8)) * (drag.to - drag.from);
      frame.scrollTop = drag.top + drag.y - event.clientY;
      look(drag.from + step, drag.to + step);
      tip.hidden = true;
      return;
    }
    const [x, y] = place(event);
    hover = y > AXIS ? boxAt(x, y + frame.scrollTop) : null;
    tell(event);
    draw();
  });
  for (const end of ["pointerup", "pointercancel"]) canvas.addEventListener(end, () => (drag = null));
  canvas.addEventListener("pointerleave", () => {
    hover = null;
    tip.hidden = true;
    draw();
  });
  canvas.addEventListener("dblclick", (event) => zoom(event.shiftKey ? 0.25 : 4, tickAt(place(event)[0])));
  canvas.addEventListener("wheel", (event) => {
    const sideways = event.shiftKey ? event.deltaY || event.deltaX : event.deltaX;
    if (event.ctrlKey || event.metaKey) zoom(Math.exp(-event.deltaY / 250), tickAt(place(event)[0]));
    else if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) pan(sideways / width);
    else return;
    event.preventDefault();
  }, { passive: false });

  const KEYS = {
    ArrowLeft: () => pan(-0.15), a: () => pan(-0.15), ArrowRight: () => pan(0.15), d: () => pan(0.15),
    "+": () => zoom(FACTOR), "=": () => zoom(FACTOR), w: () => zoom(FACTOR),
    "-": () => zoom(1 / FACTOR), s: () => zoom(1 / FACTOR), Home: whole, 0: whole,
  };
  canvas.addEventListener("keydown", (event) => {
    const act = KEYS[event.key];
    if (!act || event.ctrlKey || event.metaKey || event.altKey) return;
    act();
    event.preventDefault();
  });

  const BUTTONS = { in: () => zoom(FACTOR), out: () => zoom(1 / FACTOR), left: () => pan(-0.3), right: () => pan(0.3), whole };
  for (const button of document.querySelectorAll("[data-timeline]")) {
    button.addEventListener("click", () => BUTTONS[button.dataset.timeline]());
  }
  choice.addEventListener("change", () => choose(Number(choice.value)));
  if (showsPath) showsPath.addEventListener("change", draw);
  frame.addEventListener("scroll", draw);
  dark.addEventListener("change", draw);
  new ResizeObserver(draw).observe(frame);

  choose(0);
})();
