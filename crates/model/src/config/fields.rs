//! Fields of a JSON object, with errors that name them.

use serde_json::{Map, Value};

use crate::ModelError;

/// A JSON object in a file. A field that is `null` counts as absent.
pub(crate) struct Fields<'a> {
    path: &'a str,
    /// Name of the field that holds this object, for messages; empty for the file's own object.
    parent: &'a str,
    object: &'a Map<String, Value>,
}

impl<'a> Fields<'a> {
    pub(crate) fn new(path: &'a str, object: &'a Map<String, Value>) -> Self {
        Self { path, parent: "", object }
    }

    pub(crate) fn path(&self) -> &'a str {
        self.path
    }

    /// The field's name with that of the object it is in.
    pub(crate) fn name(&self, field: &str) -> String {
        if self.parent.is_empty() { field.to_owned() } else { format!("{}.{field}", self.parent) }
    }

    pub(crate) fn error(&self, field: &str, reason: impl Into<String>) -> ModelError {
        ModelError::bad_config(self.path, &self.name(field), reason)
    }

    pub(crate) fn value(&self, field: &str) -> Option<&'a Value> {
        self.object.get(field).filter(|value| !value.is_null())
    }

    /// Whether the field is there, even if it is `null`.
    pub(crate) fn mentions(&self, field: &str) -> bool {
        self.object.contains_key(field)
    }

    pub(crate) fn unsigned(&self, field: &str) -> Result<Option<u64>, ModelError> {
        self.typed(field, "a whole number that is not negative", Value::as_u64)
    }

    pub(crate) fn number(&self, field: &str) -> Result<Option<f64>, ModelError> {
        self.typed(field, "a number", Value::as_f64)
    }

    pub(crate) fn bool(&self, field: &str) -> Result<Option<bool>, ModelError> {
        self.typed(field, "true or false", Value::as_bool)
    }

    pub(crate) fn string(&self, field: &str) -> Result<Option<&'a str>, ModelError> {
        self.typed(field, "a string", Value::as_str)
    }

    pub(crate) fn array(&self, field: &str) -> Result<Option<&'a [Value]>, ModelError> {
        self.typed(field, "an array", |value| value.as_array().map(Vec::as_slice))
    }

    pub(crate) fn object(&self, field: &'a str) -> Result<Option<Fields<'a>>, ModelError> {
        let object = self.typed(field, "an object", Value::as_object)?;
        Ok(object.map(|object| Fields { path: self.path, parent: field, object }))
    }

    fn typed<T>(
        &self,
        field: &str,
        expected: &str,
        convert: impl Fn(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, ModelError> {
        let Some(value) = self.value(field) else { return Ok(None) };
        match convert(value) {
            Some(value) => Ok(Some(value)),
            None => Err(self.error(field, format!("must be {expected}, is {}", shortened(value)))),
        }
    }
}

/// The value as JSON, cut to what fits in a message.
fn shortened(value: &Value) -> String {
    const MAX_CHARS: usize = 60;
    let text = value.to_string();
    match text.char_indices().nth(MAX_CHARS) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text,
    }
}
