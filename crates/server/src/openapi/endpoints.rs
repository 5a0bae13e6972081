//! All endpoints.

use schemars::{JsonSchema, SchemaGenerator};
use serde_json::{Value, json};

use super::fields::Fields;
use super::operation::Operation;
use super::ranges::limit_fields;
use crate::anthropic::{self, MessageObject, count_tokens};
use crate::batches::{self, Batch};
use crate::files::FileObject;
use crate::files::object::Deleted;
use crate::files::page::Page;
use crate::openai::{chat, completions, embeddings, models, responses};
use crate::state::ServerState;
use crate::{health, tokenize};

const OPENAI: &str = "OpenAI";
const ANTHROPIC: &str = "Anthropic";
const TEXT: &str = "Text";
const JSON: &str = "application/json";

/// What makes schemas of types: of those that are read, and of those that are written.
pub(super) struct Generators<'a> {
    pub(super) read: SchemaGenerator,
    pub(super) written: SchemaGenerator,
    pub(super) state: &'a ServerState,
}

impl Generators<'_> {
    fn body(&mut self, describe: impl FnOnce(Fields<'_>) -> Fields<'_>) -> Value {
        let mut schema = describe(Fields::new(&mut self.read)).finish();
        limit_fields(&mut schema, self.state);
        schema
    }

    fn answer<T: JsonSchema>(&mut self) -> Value {
        self.written.subschema_for::<T>().to_value()
    }
}

/// Every operation but the page's files.
pub(super) fn all(make: &mut Generators<'_>) -> Vec<Operation> {
    let mut operations = openais(make);
    operations.extend(anthropics(make));
    if make.state.config().files.is_some() {
        operations.extend(files(make));
        operations.extend(batches(make));
    }
    operations.extend(texts(make));
    operations.extend(servers(make));
    operations.extend(debugs());
    operations
}

fn openais(make: &mut Generators<'_>) -> Vec<Operation> {
    let name = json!({
        "name": "model", "in": "path", "required": true, "schema": {"type": "string"},
        "description": "A name of the list; slashes in it need no escaping.",
    });
    let chunk = make.answer::<chat::Chunk>();
    let completion = make.answer::<completions::Whole>();
    let named = json!({"type": "object"});
    vec![
        Operation::post(
            "/v1/chat/completions",
            "createChatCompletion",
            "Answer a chat",
            make.body(chat::describe),
        )
        .tag(OPENAI)
        .works()
        .answers(JSON, make.answer::<chat::Whole>())
        .streams("A chat.completion.chunk; the last event's data is [DONE].", &chunk),
        Operation::post(
            "/v1/completions",
            "createCompletion",
            "Continue prompts",
            make.body(completions::describe),
        )
        .tag(OPENAI)
        .works()
        .answers(JSON, completion.clone())
        .streams("A text_completion; the last event's data is [DONE].", &completion),
        Operation::post(
            "/v1/responses",
            "createResponse",
            "Answer in items",
            make.body(responses::describe),
        )
        .tag(OPENAI)
        .described("Nothing is stored: every request brings the whole conversation.")
        .works()
        .answers(JSON, make.answer::<responses::ResponseObject>())
        .streams("Named events, from response.created to response.completed.", &named),
        Operation::post(
            "/v1/embeddings",
            "createEmbedding",
            "Embed texts",
            make.body(embeddings::describe),
        )
        .tag(OPENAI)
        .works()
        .answers(JSON, make.answer::<embeddings::EmbeddingList>()),
        Operation::get("/v1/models", "listModels", "List the model's names")
            .tag(OPENAI)
            .answers(JSON, make.answer::<models::ModelList>()),
        Operation::get("/v1/models/{model}", "retrieveModel", "Tell of one name")
            .tag(OPENAI)
            .parameter(name)
            .fails(404)
            .answers(JSON, make.answer::<models::Model>()),
    ]
}

fn anthropics(make: &mut Generators<'_>) -> Vec<Operation> {
    vec![
        Operation::post(
            "/v1/messages",
            "createMessage",
            "Answer a chat",
            make.body(anthropic::describe),
        )
        .tag(ANTHROPIC)
        .works()
        .answers(JSON, make.answer::<MessageObject>())
        .streams("Named events, from message_start to message_stop.", &json!({"type": "object"})),
        Operation::post(
            "/v1/messages/count_tokens",
            "countMessageTokens",
            "Count a prompt's tokens",
            make.body(anthropic::describe_prompt),
        )
        .tag(ANTHROPIC)
        .answers(JSON, make.answer::<count_tokens::TokenCount>()),
    ]
}

/// A parameter of a path or a query.
fn parameter(name: &str, place: &str, schema: &Value) -> Value {
    json!({"name": name, "in": place, "required": place == "path", "schema": schema})
}

/// Which part of a list.
fn paged(operation: Operation) -> Operation {
    let order = json!({"type": "string", "enum": ["asc", "desc"]});
    let limit = json!({"type": "integer", "minimum": 1, "maximum": 10_000});
    operation
        .fails(400)
        .parameter(parameter("after", "query", &json!({"type": "string"})))
        .parameter(parameter("limit", "query", &limit))
        .parameter(parameter("order", "query", &order))
}

/// Of one object, which may not be there.
fn of_one(operation: Operation) -> Operation {
    operation.tag(OPENAI).fails(404).parameter(parameter("id", "path", &json!({"type": "string"})))
}

fn files(make: &mut Generators<'_>) -> Vec<Operation> {
    let file = make.answer::<FileObject>();
    let form = json!({
        "type": "object",
        "required": ["purpose", "file"],
        "additionalProperties": false,
        "properties": {
            "purpose": {"type": "string", "enum": ["batch"]},
            "file": {"type": "string", "format": "binary", "minLength": 1},
        },
    });
    let purpose = json!({"type": "string", "enum": ["batch", "batch_output"]});
    vec![
        Operation::upload("/v1/files", "createFile", "Leave a file of requests", form)
            .tag(OPENAI)
            .answers(JSON, file.clone()),
        paged(Operation::get("/v1/files", "listFiles", "List files"))
            .tag(OPENAI)
            .parameter(parameter("purpose", "query", &purpose))
            .answers(JSON, make.answer::<Page<FileObject>>()),
        of_one(Operation::get("/v1/files/{id}", "retrieveFile", "Tell of one file"))
            .answers(JSON, file),
        of_one(Operation::act("delete", "/v1/files/{id}", "deleteFile", "Forget a file"))
            .fails(400)
            .answers(JSON, make.answer::<Deleted>()),
        of_one(Operation::get("/v1/files/{id}/content", "downloadFile", "Fetch a file"))
            .answers("application/octet-stream", json!({"type": "string", "format": "binary"})),
    ]
}

fn batches(make: &mut Generators<'_>) -> Vec<Operation> {
    let batch = make.answer::<Batch>();
    let create = make.body(batches::endpoints::describe);
    vec![
        Operation::post("/v1/batches", "createBatch", "Have a file of requests answered", create)
            .tag(OPENAI)
            .fails(429)
            .answers(JSON, batch.clone()),
        paged(Operation::get("/v1/batches", "listBatches", "List batches"))
            .tag(OPENAI)
            .answers(JSON, make.answer::<Page<Batch>>()),
        of_one(Operation::get("/v1/batches/{id}", "retrieveBatch", "Tell of one batch"))
            .answers(JSON, batch.clone()),
        of_one(Operation::act(
            "post",
            "/v1/batches/{id}/cancel",
            "cancelBatch",
            "Answer no more of a batch",
        ))
        .fails(400)
        .answers(JSON, batch),
    ]
}

fn texts(make: &mut Generators<'_>) -> Vec<Operation> {
    vec![
        Operation::post(
            "/tokenize",
            "tokenize",
            "Tell a text's tokens, or a chat's",
            make.body(tokenize::describe),
        )
        .described(
            "Either `prompt` or `messages` is required; fields of the other do not go with it.",
        )
        .tag(TEXT)
        .answers(JSON, make.answer::<tokenize::Tokenized>()),
        Operation::post(
            "/detokenize",
            "detokenize",
            "Tell the text of tokens",
            make.body(tokenize::describe_back),
        )
        .tag(TEXT)
        .answers(JSON, make.answer::<tokenize::Detokenized>()),
    ]
}

fn servers(make: &mut Generators<'_>) -> Vec<Operation> {
    let status = make.answer::<health::Health>();
    let health = |path, id, summary| {
        let operation = Operation::get(path, id, summary);
        operation.open().fails(503).answers(JSON, status.clone())
    };
    vec![
        health("/health", "health", "Whether requests are accepted"),
        health("/health/live", "healthLive", "Whether the engine lives"),
        health("/health/ready", "healthReady", "Whether requests are accepted and get on"),
        Operation::get("/version", "version", "Which version this is")
            .open()
            .answers(JSON, make.answer::<health::Version>()),
        Operation::get("/openapi.json", "openapi", "This document")
            .open()
            .answers(JSON, json!({"type": "object"})),
        Operation::get("/metrics", "metrics", "Figures, as Prometheus reads them")
            .answers("text/plain", json!({"type": "string"})),
    ]
}

/// What tells how the server works.
fn debugs() -> Vec<Operation> {
    let object = || json!({"type": "object"});
    let query = |name: &str, schema: Value| {
        let place = "query";
        json!({"name": name, "in": place, "required": false, "schema": schema})
    };
    let request = json!({
        "type": "object",
        "required": ["id", "names", "path", "is_running"],
        "properties": {
            "id": {"type": "string"},
            "names": {"type": "array", "items": {"type": "string"}},
            "path": {"type": "string"},
            "is_running": {"type": "boolean"},
        },
    });
    let id = json!({
        "name": "id", "in": "path", "required": true, "schema": {"type": "string"},
        "description": "The id of a request, or another of its names.",
    });
    vec![
        Operation::get("/debug/state", "state", "What runs and waits").answers(JSON, object()),
        Operation::get("/debug/timeline", "timeline", "The last steps, as a timeline")
            .parameter(query(
                "seconds",
                json!({"type": "number", "minimum": 0, "maximum": 3600, "default": 1}),
            ))
            .parameter(query(
                "format",
                json!({"type": "string", "enum": ["chrome", "html"], "default": "chrome"}),
            ))
            .fails(400)
            .answers(JSON, json!({"type": "array", "items": {"type": "object"}}))
            .answers("text/html", json!({"type": "string"})),
        Operation::get("/debug/requests", "requests", "The latest requests, the last one first")
            .answers(
                JSON,
                json!({
                    "type": "object",
                    "required": ["requests"],
                    "properties": {"requests": {"type": "array", "items": request}},
                }),
            ),
        Operation::get("/debug/requests/{id}", "request", "One request, step by step")
            .parameter(id)
            .fails(400)
            .answers(JSON, object()),
        Operation::get("/debug/replay", "replay", "What was decided, for `inflight replay`")
            .fails(503)
            .answers(JSON, object()),
    ]
}
