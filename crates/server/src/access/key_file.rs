//! A file of keys: lines, or JSON.
//!
//! ```text
//! # key, and what is known of it
//! sk-one    name=ann  requests_per_minute=60  tokens_per_minute=100000  max_concurrent=4
//! sha256:…  name=bob  admin
//! ```
//! ```json
//! [{"key": "sk-one", "name": "ann", "requests_per_minute": 60, "admin": true}]
//! ```

use std::num::NonZeroU32;

use serde::Deserialize;

use super::keys::{ApiKey, ApiKeys, KeyError, KeyLimits};

/// A key as JSON has it.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    /// The key, or `sha256:` and its hash.
    key: String,
    name: Option<String>,
    #[serde(default)]
    admin: bool,
    requests_per_minute: Option<NonZeroU32>,
    tokens_per_minute: Option<NonZeroU32>,
    max_concurrent: Option<NonZeroU32>,
}

impl ApiKeys {
    /// Adds the keys of a file. Errors quote nothing that may be a key.
    ///
    /// # Errors
    /// Where and what is wrong with it.
    pub fn add_file(&mut self, text: &str) -> Result<(), KeyError> {
        let before = self.all().len();
        if text.trim_start().starts_with('[') {
            self.add_json(text)?;
        } else {
            self.add_lines(text)?;
        }
        if self.all().len() == before { Err(KeyError::Empty) } else { Ok(()) }
    }

    fn add_json(&mut self, text: &str) -> Result<(), KeyError> {
        let entries: Vec<Entry> =
            serde_json::from_str(text).map_err(|error| KeyError::Json(error.to_string()))?;
        for (index, entry) in entries.into_iter().enumerate() {
            let added = entry.into_key().and_then(|key| self.add(key));
            added.map_err(|error| at(format!("key {}", index + 1), error))?;
        }
        Ok(())
    }

    fn add_lines(&mut self, text: &str) -> Result<(), KeyError> {
        for (index, line) in text.lines().enumerate() {
            if line.trim().is_empty() || line.trim_start().starts_with('#') {
                continue;
            }
            let added = parse_line(line).and_then(|key| self.add(key));
            added.map_err(|error| at(format!("line {}", index + 1), error))?;
        }
        Ok(())
    }
}

fn at(place: String, error: KeyError) -> KeyError {
    KeyError::At { place, error: Box::new(error) }
}

impl Entry {
    fn into_key(self) -> Result<ApiKey, KeyError> {
        let mut key = ApiKey::parse(&self.key)?;
        if let Some(name) = &self.name {
            key = key.named(name)?;
        }
        key.is_admin = self.admin;
        key.limits = KeyLimits {
            requests_per_minute: self.requests_per_minute,
            tokens_per_minute: self.tokens_per_minute,
            max_concurrent: self.max_concurrent,
        };
        Ok(key)
    }
}

fn parse_line(line: &str) -> Result<ApiKey, KeyError> {
    let mut words = line.split_whitespace();
    let mut key = ApiKey::parse(words.next().unwrap_or_default())?;
    for word in words {
        match word.split_once('=') {
            None if word == "admin" => key.is_admin = true,
            Some(("name", name)) => key = key.named(name)?,
            Some((name, value)) => {
                let limit = limit(&mut key.limits, name)?;
                *limit = Some(number(name, value)?);
            }
            None => return Err(KeyError::Word),
        }
    }
    Ok(key)
}

fn limit<'a>(
    limits: &'a mut KeyLimits,
    name: &str,
) -> Result<&'a mut Option<NonZeroU32>, KeyError> {
    match name {
        "requests_per_minute" => Ok(&mut limits.requests_per_minute),
        "tokens_per_minute" => Ok(&mut limits.tokens_per_minute),
        "max_concurrent" => Ok(&mut limits.max_concurrent),
        _ => Err(KeyError::Word),
    }
}

fn number(name: &str, value: &str) -> Result<NonZeroU32, KeyError> {
    let wrong = |_| KeyError::Limit { name: name.to_owned(), value: value.to_owned() };
    value.parse().map_err(wrong)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<ApiKeys, String> {
        let mut keys = ApiKeys::default();
        keys.add_file(text).map(|()| keys).map_err(|error| error.to_string())
    }

    #[test]
    fn lines_and_json_say_the_same() {
        let lines = "# keys of the team\n\n\
             sk-1 name=ann requests_per_minute=60 tokens_per_minute=9000 max_concurrent=4\n\
             \tsha256:ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad admin\r\n";
        let json = r#"[
            {"key": "sk-1", "name": "ann", "requests_per_minute": 60, "tokens_per_minute": 9000,
             "max_concurrent": 4},
            {"key": "abc", "admin": true}
        ]"#;
        let keys = parse(lines).unwrap();
        assert_eq!(keys, parse(json).unwrap());
        let [ann, admin] = keys.all() else { panic!("{keys:?}") };
        assert_eq!((ann.name.as_deref(), ann.is_admin), (Some("ann"), false));
        assert_eq!((admin.name.as_deref(), admin.is_admin), (None, true));
        assert_eq!(admin.limits, KeyLimits::default());
        let numbers = [
            ann.limits.requests_per_minute,
            ann.limits.tokens_per_minute,
            ann.limits.max_concurrent,
        ];
        assert_eq!(numbers.map(|number| number.unwrap().get()), [60, 9000, 4]);
        assert_eq!((keys.find(b"sk-1"), keys.find(b"abc")), (Some(0), Some(1)));
    }

    #[test]
    fn what_is_wrong_is_named_with_its_place() {
        let check = |text: &str, start: &str| {
            let error = parse(text).unwrap_err();
            assert!(error.starts_with(start) && !error.contains("sk-"), "{text}: {error}");
        };
        check("", "it has no keys");
        check("# sk-1\n", "it has no keys");
        check("[]", "it has no keys");
        check("sk-1\nsk-1", "line 2: the same key is there twice");
        check("sk-1\n\nsk-2 sk-3", "line 3: after a key come only name=");
        check("sk-1 colour=red", "line 1: after a key come only name=");
        check("sk-1 max_concurrent=0", "line 1: max_concurrent=0: it must be from 1");
        check("sk-1 max_concurrent=-1", "line 1: max_concurrent=-1: it must be from 1");
        check("sk-1 name=", "line 1: a key's name has");
        check("sk-1\u{e4}", "line 1: a key has");
        check(r#"[{"key": "sk-1"}, {"key": ""}]"#, "key 2: a key has");
        check(r#"[{"key": "sk-1", "limit": 1}]"#, "it is not a list of keys: unknown field");
        check(r#"[{"key": "sk-1", "max_concurrent": 0}]"#, "it is not a list of keys: invalid");
        check(r#"[{"name": "ann"}]"#, "it is not a list of keys: missing field `key`");
    }
}
