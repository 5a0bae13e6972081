//! One endpoint's description.

use serde_json::{Map, Value, json};

/// Errors of whatever may be asked.
const ALWAYS: [u16; 1] = [500];
/// Errors of what has a body.
const WITH_BODY: [u16; 6] = [400, 404, 408, 413, 415, 503];
/// Errors of what the engine works on.
const WITH_WORK: [u16; 2] = [429, 504];

/// A method of a path.
#[derive(Clone, Debug)]
pub(super) struct Operation {
    pub(super) method: &'static str,
    pub(super) path: &'static str,
    pub(super) is_open: bool,
    id: &'static str,
    tag: &'static str,
    summary: &'static str,
    description: Option<&'static str>,
    parameters: Vec<Value>,
    body: Option<Value>,
    body_type: &'static str,
    content: Map<String, Value>,
    errors: Vec<u16>,
}

impl Operation {
    pub(super) fn get(path: &'static str, id: &'static str, summary: &'static str) -> Self {
        Self {
            method: "get",
            path,
            is_open: false,
            id,
            tag: "Server",
            summary,
            description: None,
            parameters: Vec::new(),
            body: None,
            body_type: "application/json",
            content: Map::new(),
            errors: ALWAYS.to_vec(),
        }
    }

    /// Takes a body, of which `schema` tells.
    pub(super) fn post(
        path: &'static str,
        id: &'static str,
        summary: &'static str,
        schema: Value,
    ) -> Self {
        let mut operation =
            Self { method: "post", body: Some(schema), ..Self::get(path, id, summary) };
        operation.errors.extend(WITH_BODY);
        operation
    }

    /// Takes a form, of whose fields `schema` tells.
    pub(super) fn upload(
        path: &'static str,
        id: &'static str,
        summary: &'static str,
        schema: Value,
    ) -> Self {
        Self { body_type: "multipart/form-data", ..Self::post(path, id, summary, schema) }
    }

    /// Does something, without a body.
    pub(super) fn act(
        method: &'static str,
        path: &'static str,
        id: &'static str,
        summary: &'static str,
    ) -> Self {
        Self { method, ..Self::get(path, id, summary) }
    }

    pub(super) fn tag(self, tag: &'static str) -> Self {
        Self { tag, ..self }
    }

    pub(super) fn open(self) -> Self {
        Self { is_open: true, ..self }
    }

    pub(super) fn described(self, description: &'static str) -> Self {
        Self { description: Some(description), ..self }
    }

    /// Gives the engine work, so that there may be no room or no time for it.
    pub(super) fn works(mut self) -> Self {
        self.errors.extend(WITH_WORK);
        self
    }

    pub(super) fn fails(mut self, status: u16) -> Self {
        self.errors.push(status);
        self
    }

    pub(super) fn parameter(mut self, parameter: Value) -> Self {
        self.parameters.push(parameter);
        self
    }

    /// Answers with this type of content.
    pub(super) fn answers(mut self, content_type: &str, schema: Value) -> Self {
        self.content.insert(content_type.to_owned(), json!({"schema": schema}));
        self
    }

    /// Answers in server-sent events if `stream` is true. The schema is one event's, as tools read
    /// it and OpenAPI 3.2 has it.
    pub(super) fn streams(self, description: &str, data: &Value) -> Self {
        let event = json!({
            "description": description,
            "type": "object",
            "required": ["data"],
            "properties": {
                "event": {"type": "string"},
                "data": {"type": "string", "anyOf": [
                    {"const": "[DONE]"},
                    {"contentMediaType": "application/json", "contentSchema": data},
                ]},
            },
        });
        self.answers("text/event-stream", event)
    }

    /// The operation as a document has it. `needs_key`: whether this server has keys.
    pub(super) fn to_json(&self, needs_key: bool) -> Value {
        let mut responses = Map::new();
        let answer = json!({"description": "The answer.", "content": self.content});
        responses.insert("200".to_owned(), answer);
        let mut errors = self.errors.clone();
        if needs_key && !self.is_open {
            errors.extend([401, 403, 429]);
        }
        errors.sort_unstable();
        errors.dedup();
        for status in errors {
            responses.insert(status.to_string(), error_response(status, self.tag));
        }
        let mut operation = json!({
            "operationId": self.id,
            "tags": [self.tag],
            "summary": self.summary,
            "responses": responses,
        });
        if let Some(description) = self.description {
            operation["description"] = description.into();
        }
        if !self.parameters.is_empty() {
            operation["parameters"] = json!(self.parameters);
        }
        if let Some(body) = &self.body {
            operation["requestBody"] =
                json!({"required": true, "content": {self.body_type: {"schema": body}}});
        }
        if needs_key && self.is_open {
            operation["security"] = json!([]);
        }
        operation
    }
}

fn error_response(status: u16, tag: &str) -> Value {
    let form = if tag == "Anthropic" { "AnthropicError" } else { "Error" };
    let schema = json!({"$ref": format!("#/components/schemas/{form}")});
    let mut response = json!({
        "description": meaning(status),
        "content": {"application/json": {"schema": schema}},
    });
    if matches!(status, 429 | 503) {
        response["headers"] = json!({"Retry-After": {
            "description": "Seconds after which to come back, where that is known.",
            "schema": {"type": "integer", "minimum": 1},
        }});
    }
    response
}

fn meaning(status: u16) -> &'static str {
    match status {
        400 => "A field is wrong; the message names it.",
        401 => "No API key was sent, or none of this server's.",
        403 => "The API key is not an administrator's.",
        404 => "There is no such model.",
        408 => "The body did not arrive in time.",
        413 => "The body is too large.",
        415 => "The body is not application/json.",
        429 => "The queue is full, or a limit of the API key is reached.",
        503 => "The server is shutting down, its engine has stopped, or the wait was too long.",
        504 => "The time that the request or the server allows was up.",
        _ => "The server failed; its log says how.",
    }
}
