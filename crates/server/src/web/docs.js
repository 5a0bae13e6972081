"use strict";
// The API's description for people, made of /openapi.json.

const byId = (id) => document.getElementById(id);

/** An element with attributes and children; texts stay texts. */
function make(name, attributes, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children.flat().filter((child) => child !== undefined));
  return element;
}

const nameOf = (reference) => reference.split("/").pop();

/** What a schema is of, in a few words and links. */
function type(schema) {
  if (schema === true || Object.keys(schema).length === 0) return ["anything"];
  if (schema.$ref) {
    const name = nameOf(schema.$ref);
    return [make("a", { href: `#schema-${name}` }, name)];
  }
  const choices = schema.anyOf ?? schema.oneOf;
  if (choices) {
    return choices.flatMap((choice, index) => [...(index ? [" or "] : []), ...type(choice)]);
  }
  if ("const" in schema) return [JSON.stringify(schema.const)];
  if (schema.enum) return [schema.enum.map((value) => JSON.stringify(value)).join(", ")];
  const kinds = [schema.type ?? "anything"].flat();
  return kinds.flatMap((kind, index) => [
    ...(index ? [" or "] : []),
    ...(kind === "array" && schema.items ? ["list of ", ...type(schema.items)] : [kind]),
  ]);
}

const LIMITS = {
  minimum: "from", exclusiveMinimum: "over", maximum: "to", minLength: "characters from",
  maxLength: "characters to", minItems: "entries from", maxItems: "entries to", pattern: "like",
};

/** Beyond this a limit is that of the number's type, and says nothing. */
const FAR = 1e15;

function limits(schema) {
  return Object.entries(LIMITS)
    .filter(([key]) => key in schema && !(Math.abs(schema[key]) > FAR))
    .map(([key, word]) => `${word} ${schema[key]}`).join(", ");
}

function fieldRow(name, described, required) {
  const schema = described === true ? {} : described;
  const note = [limits(schema), schema.description].filter(Boolean).join(". ");
  return make("tr", {},
    make("td", {}, make("code", {}, name), required ? " (required)" : ""),
    make("td", {}, type(schema)),
    make("td", { class: "muted" }, note));
}

function fields(schema) {
  if (!schema.properties) return make("p", {}, type(schema));
  const rows = Object.entries(schema.properties).map(([name, property]) =>
    fieldRow(name, property, schema.required?.includes(name)));
  return make("table", {}, make("tbody", {}, rows));
}

function choicesOf(schema) {
  const choices = schema.oneOf ?? schema.anyOf;
  return choices ? choices.map(fields) : [fields(schema)];
}

function answers(responses) {
  const rows = Object.entries(responses).map(([status, response]) => {
    const contents = Object.entries(response.content ?? {}).flatMap(([kind, { schema }]) => [
      make("code", {}, kind), " ", ...type(schema),
      ...(schema.description ? [` (${schema.description})`] : []), make("br", {}),
    ]);
    return make("tr", {}, make("td", {}, status), make("td", {}, contents),
      make("td", { class: "muted" }, response.description));
  });
  return make("table", {}, make("tbody", {}, rows));
}

function operation(method, path, described) {
  // JSON or a form: each operation takes one of them.
  const body = Object.values(described.requestBody?.content ?? {})[0]?.schema;
  const parameters = described.parameters?.map((parameter) =>
    fieldRow(parameter.name, { ...parameter.schema, description: parameter.description },
      parameter.required));
  return make("details", { id: described.operationId },
    make("summary", {}, make("code", {}, `${method.toUpperCase()} ${path}`), " ",
      described.summary),
    described.description ? make("p", {}, described.description) : undefined,
    parameters ? make("table", {}, make("tbody", {}, parameters)) : undefined,
    body ? make("h3", {}, "Fields") : undefined,
    body ? fields(body) : undefined,
    make("h3", {}, "Answers"),
    answers(described.responses));
}

function show(api) {
  byId("version").textContent = api.info.version;
  byId("about").textContent = api.info.description;
  const groups = new Map();
  for (const [path, methods] of Object.entries(api.paths)) {
    for (const [method, described] of Object.entries(methods)) {
      const group = described.tags[0];
      groups.set(group, [...(groups.get(group) ?? []), operation(method, path, described)]);
    }
  }
  for (const [group, operations] of groups) {
    byId("contents").append(make("li", {}, make("a", { href: `#group-${group}` }, group)));
    byId("operations").append(make("h2", { id: `group-${group}` }, group), ...operations);
  }
  byId("schemas").append(...Object.entries(api.components.schemas).map(([name, schema]) =>
    make("details", { id: `schema-${name}` }, make("summary", {}, make("code", {}, name)),
      schema.description ? make("p", {}, schema.description) : undefined, choicesOf(schema))));
}

/** A link leads to what is folded, too. */
function unfold() {
  const target = location.hash && document.getElementById(location.hash.slice(1));
  if (!target) return;
  target.open = true;
  target.scrollIntoView();
}

addEventListener("hashchange", unfold);
fetch("/openapi.json")
  .then((response) => response.json())
  .then(show)
  .then(unfold)
  .catch((error) => { byId("about").textContent = `There is nothing to show: ${error.message}`; });
