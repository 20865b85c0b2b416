// Elements that the views share. Text is always set as text: a model's output is never markup.
"use strict";

megarl.element = (tag, attributes = {}, ...children) =>
  megarl.fill(document.createElement(tag), attributes, children);

megarl.svg = (tag, attributes = {}, ...children) =>
  megarl.fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);

megarl.fill = (element, attributes, children) => {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null));
  return element;
};

/** Return three or four significant digits. */
megarl.number = (value) => {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(2);
  if (Number.isInteger(value)) return value.toLocaleString("en");
  return size >= 100 ? value.toFixed(1) : String(Number(value.toPrecision(3)));
};

megarl.seconds = (value) => {
  if (value < 1) return `${Math.round(value * 1000)} ms`;
  if (value < 90) return `${value.toFixed(1)} s`;
  const minutes = Math.floor(value / 60);
  return minutes < 90
    ? `${minutes} min ${Math.round(value % 60)} s`
    : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
};

/** Return a function that calls `action` once, after calls have stopped for a while. */
megarl.debounced = (action, milliseconds = 150) => {
  let timer = 0;
  return () => {
    clearTimeout(timer);
    timer = setTimeout(action, milliseconds);
  };
};
