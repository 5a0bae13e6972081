//! One tool call written as a JSON object, taken apart as its characters come.

use super::Piece;
use super::json_scanner::{Fed, JsonScanner};

/// What a character meant for the call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Progress {
    Inside,
    /// The object ends with this character.
    Done,
    /// This is no call, or its text is no JSON. If the call was announced, what comes now is still
    /// its arguments, as the model wrote them.
    Malformed,
}

/// Reads `{"name": ..., "arguments": {...}}`, members in any order and under the names that models
/// use, and tells the arguments' text as it comes.
#[derive(Debug, Default)]
pub(crate) struct CallScanner {
    state: State,
    name: Option<String>,
    /// Arguments that came before the name.
    early: String,
    has_arguments: bool,
    is_announced: bool,
    /// Only the arguments are written as JSON: the call ends with them.
    is_bare: bool,
}

#[derive(Debug, Default)]
enum State {
    #[default]
    Open,
    /// Before a key; the first one may be missing.
    Key {
        may_end: bool,
    },
    /// In a key's quotes.
    KeyText(String, JsonScanner),
    Colon(Member),
    Value(Member, Reading),
    CommaOrEnd,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Member {
    Name,
    Arguments,
    Other,
}

impl Member {
    fn of(key: &str) -> Self {
        match key {
            "name" => Self::Name,
            "arguments" | "parameters" => Self::Arguments,
            _ => Self::Other,
        }
    }
}

/// A member's value, so far.
#[derive(Debug, Default)]
struct Reading {
    json: JsonScanner,
    /// All of it, unless it is told as it comes.
    text: String,
    is_streamed: bool,
}

impl CallScanner {
    /// Reads the arguments of a call whose name came before.
    pub(crate) fn of_arguments(name: String, pieces: &mut Vec<Piece>) -> Self {
        let state = State::Value(Member::Arguments, Reading::default());
        let mut scanner = Self { state, is_bare: true, ..Self::default() };
        scanner.announce(name, pieces);
        scanner
    }

    /// Takes the next character. `is_tool` says which names are tools.
    pub(crate) fn feed(
        &mut self,
        c: char,
        is_tool: &dyn Fn(&str) -> bool,
        pieces: &mut Vec<Piece>,
    ) -> Progress {
        let is_space = c.is_ascii_whitespace();
        match std::mem::take(&mut self.state) {
            State::Open if is_space => self.go(State::Open),
            State::Open if c == '{' => self.go(State::Key { may_end: true }),
            State::Key { may_end } if is_space => self.go(State::Key { may_end }),
            State::Key { may_end: true } if c == '}' => self.end(pieces),
            State::Key { .. } if c == '"' => {
                let mut json = JsonScanner::default();
                json.feed(c);
                self.go(State::KeyText("\"".to_owned(), json))
            }
            State::KeyText(mut text, mut json) => {
                text.push(c);
                match json.feed(c) {
                    Fed::Inside => self.go(State::KeyText(text, json)),
                    Fed::Last => {
                        let key: String = serde_json::from_str(&text).unwrap_or_default();
                        self.go(State::Colon(Member::of(&key)))
                    }
                    Fed::After | Fed::Invalid => Progress::Malformed,
                }
            }
            State::Colon(member) if is_space => self.go(State::Colon(member)),
            State::Colon(member) if c == ':' => self.go(State::Value(member, Reading::default())),
            State::Value(member, reading) => self.feed_value(c, member, reading, is_tool, pieces),
            State::CommaOrEnd if is_space => self.go(State::CommaOrEnd),
            State::CommaOrEnd if c == ',' => self.go(State::Key { may_end: false }),
            State::CommaOrEnd if c == '}' => self.end(pieces),
            State::Open | State::Key { .. } | State::Colon(_) | State::CommaOrEnd => {
                Progress::Malformed
            }
        }
    }

    /// Whether the call's name was told.
    pub(crate) fn is_announced(&self) -> bool {
        self.is_announced
    }

    fn go(&mut self, state: State) -> Progress {
        self.state = state;
        Progress::Inside
    }

    fn feed_value(
        &mut self,
        c: char,
        member: Member,
        mut reading: Reading,
        is_tool: &dyn Fn(&str) -> bool,
        pieces: &mut Vec<Piece>,
    ) -> Progress {
        let is_first = reading.text.is_empty() && !reading.is_streamed;
        if is_first && c.is_ascii_whitespace() {
            return self.go(State::Value(member, reading));
        }
        reading.is_streamed |= is_first && c == '{' && member == Member::Arguments;
        let fed = reading.json.feed(c);
        match fed {
            Fed::Invalid => return Progress::Malformed,
            Fed::After => {}
            Fed::Inside | Fed::Last if reading.is_streamed => self.tell(c, pieces),
            Fed::Inside | Fed::Last => reading.text.push(c),
        }
        if fed == Fed::Inside {
            return self.go(State::Value(member, reading));
        }
        if !self.take_value(member, &reading, is_tool, pieces) {
            return Progress::Malformed;
        }
        if self.is_bare {
            return Progress::Done;
        }
        self.state = State::CommaOrEnd;
        if fed == Fed::After { self.feed(c, is_tool, pieces) } else { Progress::Inside }
    }

    /// Takes a whole member; false if no call has such a one.
    fn take_value(
        &mut self,
        member: Member,
        reading: &Reading,
        is_tool: &dyn Fn(&str) -> bool,
        pieces: &mut Vec<Piece>,
    ) -> bool {
        match member {
            Member::Name => match serde_json::from_str::<String>(&reading.text) {
                Ok(name) if self.name.is_none() && is_tool(&name) => {
                    self.announce(name, pieces);
                    true
                }
                _ => false,
            },
            Member::Arguments if self.has_arguments => false,
            Member::Arguments => {
                self.has_arguments = true;
                reading.is_streamed || self.take_unusual_arguments(&reading.text, pieces)
            }
            Member::Other => true,
        }
    }

    /// Arguments that are no object: null means none, a text may hold the object.
    fn take_unusual_arguments(&mut self, text: &str, pieces: &mut Vec<Piece>) -> bool {
        let object = match serde_json::from_str(text) {
            Ok(serde_json::Value::Null) => "{}".to_owned(),
            Ok(serde_json::Value::String(inner)) if is_object(&inner) => inner,
            _ => return false,
        };
        object.chars().for_each(|c| self.tell(c, pieces));
        true
    }

    fn announce(&mut self, name: String, pieces: &mut Vec<Piece>) {
        self.is_announced = true;
        pieces.push(Piece::Call { name: name.clone() });
        self.name = Some(name);
        for c in std::mem::take(&mut self.early).chars() {
            Piece::Arguments(c.to_string()).join(pieces);
        }
    }

    fn tell(&mut self, c: char, pieces: &mut Vec<Piece>) {
        if self.is_announced {
            Piece::Arguments(c.to_string()).join(pieces);
        } else {
            self.early.push(c);
        }
    }

    /// The object ends: a call has a name; one without arguments has empty ones.
    fn end(&mut self, pieces: &mut Vec<Piece>) -> Progress {
        if !self.is_announced {
            return Progress::Malformed;
        }
        if !self.has_arguments {
            Piece::Arguments("{}".to_owned()).join(pieces);
        }
        Progress::Done
    }
}

fn is_object(text: &str) -> bool {
    serde_json::from_str::<serde_json::Map<String, serde_json::Value>>(text).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scan(text: &str) -> (Progress, Vec<Piece>) {
        let (mut scanner, mut pieces) = (CallScanner::default(), Vec::new());
        let mut progress = Progress::Inside;
        for c in text.chars() {
            progress = scanner.feed(c, &|name| name != "nobody", &mut pieces);
            if progress != Progress::Inside {
                break;
            }
        }
        (progress, pieces)
    }

    fn call(name: &str, arguments: &str) -> Vec<Piece> {
        vec![Piece::Call { name: name.to_owned() }, Piece::Arguments(arguments.to_owned())]
    }

    #[test]
    fn calls_in_all_spellings() {
        let done = |text: &str, arguments: &str| {
            assert_eq!(scan(text), (Progress::Done, call("f", arguments)), "{text}");
        };
        done(r#"{"name": "f", "arguments": {"a": [1, {"b": "}"}]}}"#, r#"{"a": [1, {"b": "}"}]}"#);
        done(r#" {"type":"function","name":"f","parameters":{}}"#, "{}");
        done(r#"{"arguments": {"a": 1}, "name": "f"}"#, r#"{"a": 1}"#);
        done(r#"{"name": "f"}"#, "{}");
        done(r#"{"name": "f", "arguments": null}"#, "{}");
        done(r#"{"name": "f", "arguments": "{\"a\": \"\\n\"}"}"#, r#"{"a": "\n"}"#);
        done(r#"{"id": 7, "name": "\u0066", "arguments": {"a": 1}}"#, r#"{"a": 1}"#);
    }

    #[test]
    fn what_is_no_call() {
        let none = |text: &str| assert_eq!(scan(text), (Progress::Malformed, vec![]), "{text}");
        none("[]");
        none("{}");
        none(r#"{"name": 3}"#);
        none(r#"{"name": "nobody", "arguments": {}}"#);
        none(r#"{"arguments": {"a": 1}}"#);
        none(r#"{"arguments": 5, "name": "f"}"#);
        none(r#"{"arguments": {"a" 1}"#);
        let (progress, pieces) = scan(r#"{"name": "f", "arguments": {"a": tru"}"#);
        assert_eq!((progress, pieces), (Progress::Malformed, call("f", r#"{"a": tru"#)));
    }
}
