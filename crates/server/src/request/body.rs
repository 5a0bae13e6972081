//! A request's body, read part by part, so that no field goes unseen.
//!
//! OpenAI's requests are flat, while their fields belong to groups that endpoints share. Each group
//! is a struct; [`Body::take`] reads one and removes its fields, [`Body::refuse_rest`] ends with an
//! error for those that no group wanted.

use std::collections::BTreeMap;
use std::error::Error as _;
use std::{fmt, io};

use axum::body::Bytes;
use axum::extract::rejection::BytesRejection;
use axum::http::{HeaderMap, StatusCode, header};
use serde::de::value::MapDeserializer;
use serde::de::{Deserialize, Deserializer, Error as _, Visitor};
use serde_json::value::RawValue;
use serde_json::{Error, Value};

use super::neutral::{Neutral, Values};
use crate::error::ApiError;
use crate::state::{Phase, ServerState};

/// The fields that were not taken yet, by name. Values are parsed when taken.
pub(crate) struct Body<'a> {
    fields: BTreeMap<String, &'a RawValue>,
}

/// Lets a request in that may be served: JSON of an allowed size, while the server is serving.
pub(crate) fn admit(
    state: &ServerState,
    headers: &HeaderMap,
    body: Result<Bytes, BytesRejection>,
) -> Result<Bytes, ApiError> {
    if state.phase() != Phase::Serving {
        return Err(ApiError::ShuttingDown);
    }
    let content_type = headers.get(header::CONTENT_TYPE);
    let content_type =
        content_type.map_or("absent", |value| value.to_str().unwrap_or("unreadable"));
    let media_type = content_type.split(';').next().unwrap_or_default().trim();
    // Anything else is what a browser sends to foreign servers without asking them first.
    if !media_type.eq_ignore_ascii_case("application/json") {
        return Err(ApiError::ContentType(content_type.to_owned()));
    }
    body.map_err(|rejection| match rejection.status() {
        StatusCode::PAYLOAD_TOO_LARGE => {
            ApiError::BodyTooLarge { max_bytes: state.config().max_body_bytes }
        }
        _ if is_timeout(&rejection) => ApiError::BodyTimeout,
        _ => ApiError::BadBody(rejection.body_text()),
    })
}

/// Whether a body was given up because it did not come.
fn is_timeout(rejection: &BytesRejection) -> bool {
    let mut cause = rejection.source();
    while let Some(error) = cause {
        let io_error = error.downcast_ref::<io::Error>();
        if io_error.is_some_and(|error| error.kind() == io::ErrorKind::TimedOut) {
            return true;
        }
        cause = error.source();
    }
    false
}

impl<'a> Body<'a> {
    /// Splits a JSON object into its fields.
    pub(crate) fn parse(bytes: &'a [u8]) -> Result<Self, ApiError> {
        if bytes.is_empty() {
            return Err(ApiError::BadBody("it is empty".to_owned()));
        }
        let fields = serde_json::from_slice(bytes)
            .map_err(|error| ApiError::BadBody(error.to_string().replace("a map", "an object")))?;
        Ok(Self { fields })
    }

    /// Takes the fields that `T`, a struct, declares. Absent ones are up to `T`.
    ///
    /// # Errors
    /// The first field whose value has a wrong type, with its path.
    pub(crate) fn take<T: Deserialize<'a>>(&mut self) -> Result<T, ApiError> {
        let names = field_names::<T>();
        let taken = names.iter().filter_map(|&name| Some((name, self.fields.remove(name)?)));
        let values = MapDeserializer::<_, Error>::new(taken.collect::<Vec<_>>().into_iter());
        serde_path_to_error::deserialize(values).map_err(|error| {
            ApiError::invalid(error.path().to_string(), plain_reason(error.inner()))
        })
    }

    /// Takes fields that change nothing.
    ///
    /// # Errors
    /// A field with a value that would change something.
    pub(crate) fn take_neutral(&mut self, table: &[Neutral]) -> Result<(), ApiError> {
        for Neutral { name, values } in table {
            let Some(raw) = self.fields.remove(*name) else { continue };
            let Values::Only(allowed) = values else { continue };
            let value: Value = serde_json::from_str(raw.get())
                .map_err(|error| ApiError::invalid(*name, plain_reason(&error)))?;
            let equals =
                |text: &&str| serde_json::from_str::<Value>(text).is_ok_and(|v| v == value);
            if !value.is_null() && !allowed.iter().any(equals) {
                let reason = match allowed.join(" or ") {
                    none if none.is_empty() => "leave it out".to_owned(),
                    some => format!("leave it out or set it to {some}"),
                };
                return Err(ApiError::unsupported(*name, reason));
            }
        }
        Ok(())
    }

    /// Ends the reading.
    ///
    /// # Errors
    /// A field that nobody took.
    pub(crate) fn refuse_rest(self) -> Result<(), ApiError> {
        match self.fields.into_keys().next() {
            Some(param) => Err(ApiError::UnknownField { param }),
            None => Ok(()),
        }
    }
}

/// What is wrong with a value, in JSON's words instead of Rust's and without the position, which
/// would be counted from the value's start.
fn plain_reason(error: &Error) -> String {
    let mut text = error.to_string();
    if let Some(end) = text.rfind(" at line ") {
        text.truncate(end);
    }
    let Some((found, expected)) = text.split_once(", expected ") else { return text };
    let expected = match expected {
        "f32" | "f64" => "a number",
        "u8" | "u32" | "u64" | "usize" => "an integer that is not negative",
        "i32" | "i64" => "an integer",
        "a sequence" => "a list",
        "a map" => "an object",
        other => other.strip_prefix("struct ").map_or(other, |_| "an object"),
    };
    let found = match found {
        "invalid type: sequence" => "invalid type: list",
        "invalid type: map" => "invalid type: object",
        other => other,
    };
    format!("{found}, expected {expected}")
}

/// The names of the fields that a struct deserializes from.
fn field_names<'de, T: Deserialize<'de>>() -> &'static [&'static str] {
    let mut names: &'static [&'static str] = &[];
    // Always an error: asking for the names is all that it is for.
    let _ = T::deserialize(NameCatcher { names: &mut names });
    names
}

/// Learns what a struct asks a deserializer for, and gives nothing.
struct NameCatcher<'n> {
    names: &'n mut &'static [&'static str],
}

impl<'de> Deserializer<'de> for NameCatcher<'_> {
    type Error = serde::de::value::Error;

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _name: &'static str,
        fields: &'static [&'static str],
        _visitor: V,
    ) -> Result<V::Value, Self::Error> {
        *self.names = fields;
        Err(Self::Error::custom("only the names were wanted"))
    }

    fn deserialize_any<V: Visitor<'de>>(self, _visitor: V) -> Result<V::Value, Self::Error> {
        Err(Self::Error::custom("not a struct"))
    }

    serde::forward_to_deserialize_any! {
        bool i8 i16 i32 i64 u8 u16 u32 u64 f32 f64 char str string bytes byte_buf option unit
        unit_struct newtype_struct seq tuple tuple_struct map enum identifier ignored_any
    }
}

impl fmt::Debug for Body<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.fields.keys()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, Default, serde::Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Inner {
        #[expect(dead_code)]
        depth: u32,
    }

    #[derive(Debug, Default, serde::Deserialize)]
    struct Part {
        heat: Option<f32>,
        #[expect(dead_code)]
        list: Option<Vec<Inner>>,
        #[expect(dead_code)]
        flag: Option<bool>,
    }

    fn take(text: &str) -> Result<Part, ApiError> {
        let mut body = Body::parse(text.as_bytes())?;
        let part = body.take()?;
        body.take_neutral(&[
            Neutral { name: "label", values: Values::All },
            Neutral { name: "tools", values: Values::Only(&["[]"]) },
            Neutral { name: "suffix", values: Values::Only(&[]) },
        ])?;
        body.refuse_rest()?;
        Ok(part)
    }

    #[test]
    fn values_and_absent_values() {
        assert_eq!(take(r#"{"heat": 0.5, "label": {"any": 1}}"#).unwrap().heat, Some(0.5));
        assert_eq!(take(r#"{"heat": null, "tools": [ ], "suffix": null}"#).unwrap().heat, None);
        assert_eq!(take("{}").unwrap().heat, None);
    }

    #[test]
    fn every_error_names_its_field() {
        let check = |text: &str, message: &str| {
            assert_eq!(take(text).unwrap_err().to_string(), message, "{text}");
        };
        check(r#"{"heat": "hot"}"#, "`heat`: invalid type: string \"hot\", expected a number");
        check(r#"{"heat": [1]}"#, "`heat`: invalid type: list, expected a number");
        check(r#"{"flag": 1}"#, "`flag`: invalid type: integer `1`, expected a boolean");
        check(r#"{"list": 1}"#, "`list`: invalid type: integer `1`, expected a list");
        check(r#"{"list": [{"depth": 1}, {}]}"#, "`list[1]`: missing field `depth`");
        check(
            r#"{"list": [{"depth": -1}]}"#,
            "`list[0].depth`: invalid value: integer `-1`, \
             expected an integer that is not negative",
        );
        check(
            r#"{"list": [{"width": 1}]}"#,
            "`list[0].width`: unknown field `width`, expected `depth`",
        );
        check(r#"{"heet": 1}"#, "`heet` is not a field of this endpoint");
        check(r#"{"tools": [1]}"#, "`tools` is not supported: leave it out or set it to []");
        check(r#"{"suffix": ""}"#, "`suffix` is not supported: leave it out");
        check("", "the body is not a JSON object: it is empty");
        let start = "the body is not a JSON object: ";
        for text in ["[1]", "3", "{", "{\"heat\": }", "\u{7f}"] {
            assert!(take(text).unwrap_err().to_string().starts_with(start), "{text}");
        }
    }
}
