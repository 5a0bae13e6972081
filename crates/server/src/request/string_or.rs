//! A field that is a string or a list.

use std::borrow::Cow;
use std::fmt;
use std::marker::PhantomData;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::de::value::SeqAccessDeserializer;
use serde::de::{Error, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};

/// A string, or a list; errors in the list's members name their place, which those of an untagged
/// enum would not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum StringOr<T> {
    String(String),
    List(Vec<T>),
}

impl<'de, T: Deserialize<'de>> Deserialize<'de> for StringOr<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(StringOrVisitor(PhantomData))
    }
}

impl<T: JsonSchema> JsonSchema for StringOr<T> {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> Cow<'static, str> {
        format!("StringOr_{}", T::schema_name()).into()
    }

    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        let items = generator.subschema_for::<T>();
        json_schema!({"anyOf": [{"type": "string"}, {"type": "array", "items": items}]})
    }
}

struct StringOrVisitor<T>(PhantomData<T>);

impl<'de, T: Deserialize<'de>> Visitor<'de> for StringOrVisitor<T> {
    type Value = StringOr<T>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a string or a list")
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<StringOr<T>, E> {
        Ok(StringOr::String(text.to_owned()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, items: A) -> Result<StringOr<T>, A::Error> {
        Vec::deserialize(SeqAccessDeserializer::new(items)).map(StringOr::List)
    }
}
