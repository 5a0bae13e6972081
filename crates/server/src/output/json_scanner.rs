//! One JSON value, recognised as its characters come.

/// A value nested deeper is not followed.
const MAX_DEPTH: usize = 128;

/// What a character meant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fed {
    /// The value goes on.
    Inside,
    /// The value ends with this character.
    Last,
    /// The value, a number, had ended before this character.
    After,
    /// No value goes on like this.
    Invalid,
}

/// Follows one value. White space around it is not part of it.
///
/// # Source
/// RFC 8259.
#[derive(Clone, Debug, Default)]
pub(crate) struct JsonScanner {
    /// The open containers, outermost first.
    stack: Vec<Container>,
    state: State,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Container {
    Object,
    List,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum State {
    #[default]
    Value,
    /// After `[`.
    ValueOrEnd,
    /// After `{`.
    KeyOrEnd,
    Key,
    Colon,
    CommaOrEnd,
    Text(Text),
    /// A key's text.
    KeyText(Text),
    Number(Number),
    /// What of `true`, `false` or `null` is still to come.
    Word(&'static str),
}

/// Where in a string.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Text {
    Plain,
    Escaped,
    /// So many hexadecimal digits are to come.
    Hex(u8),
}

/// What of a number was read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Number {
    Minus,
    Zero,
    Digits,
    Point,
    Fraction,
    Exponent,
    ExponentSign,
    ExponentDigits,
}

impl JsonScanner {
    /// Takes the next character. After any answer but `Inside` the scanner is spent.
    pub(crate) fn feed(&mut self, c: char) -> Fed {
        match self.state {
            State::Text(text) => self.feed_text(text, c, State::Text),
            State::KeyText(text) => self.feed_text(text, c, State::KeyText),
            State::Number(number) => self.feed_number(number, c),
            State::Word(rest) => self.feed_word(rest, c),
            _ if matches!(c, ' ' | '\t' | '\n' | '\r') => Fed::Inside,
            State::Value => self.begin(c),
            State::ValueOrEnd if c == ']' => self.close(),
            State::ValueOrEnd => self.begin(c),
            State::KeyOrEnd if c == '}' => self.close(),
            State::KeyOrEnd | State::Key if c == '"' => self.go(State::KeyText(Text::Plain)),
            State::Colon if c == ':' => self.go(State::Value),
            State::CommaOrEnd => self.feed_separator(c),
            State::KeyOrEnd | State::Key | State::Colon => Fed::Invalid,
        }
    }

    fn go(&mut self, state: State) -> Fed {
        self.state = state;
        Fed::Inside
    }

    fn begin(&mut self, c: char) -> Fed {
        match c {
            '{' => self.open(Container::Object, State::KeyOrEnd),
            '[' => self.open(Container::List, State::ValueOrEnd),
            '"' => self.go(State::Text(Text::Plain)),
            '-' => self.go(State::Number(Number::Minus)),
            '0' => self.go(State::Number(Number::Zero)),
            '1'..='9' => self.go(State::Number(Number::Digits)),
            't' => self.go(State::Word("rue")),
            'f' => self.go(State::Word("alse")),
            'n' => self.go(State::Word("ull")),
            _ => Fed::Invalid,
        }
    }

    fn open(&mut self, container: Container, state: State) -> Fed {
        if self.stack.len() == MAX_DEPTH {
            return Fed::Invalid;
        }
        self.stack.push(container);
        self.go(state)
    }

    fn close(&mut self) -> Fed {
        self.stack.pop();
        self.ended()
    }

    /// After a whole value.
    fn ended(&mut self) -> Fed {
        if self.stack.is_empty() { Fed::Last } else { self.go(State::CommaOrEnd) }
    }

    fn feed_separator(&mut self, c: char) -> Fed {
        match (self.stack.last(), c) {
            (Some(Container::Object), ',') => self.go(State::Key),
            (Some(Container::List), ',') => self.go(State::Value),
            (Some(Container::Object), '}') | (Some(Container::List), ']') => self.close(),
            _ => Fed::Invalid,
        }
    }

    fn feed_text(&mut self, text: Text, c: char, state: fn(Text) -> State) -> Fed {
        match (text, c) {
            (Text::Plain, '"') if state(Text::Plain) == State::KeyText(Text::Plain) => {
                self.go(State::Colon)
            }
            (Text::Plain, '"') => self.ended(),
            (Text::Plain, '\\') => self.go(state(Text::Escaped)),
            (Text::Plain, '\0'..='\u{1f}') => Fed::Invalid,
            (Text::Plain, _) => Fed::Inside,
            (Text::Escaped, 'u') => self.go(state(Text::Hex(4))),
            (Text::Escaped, '"' | '\\' | '/' | 'b' | 'f' | 'n' | 'r' | 't') => {
                self.go(state(Text::Plain))
            }
            (Text::Hex(1), c) if c.is_ascii_hexdigit() => self.go(state(Text::Plain)),
            (Text::Hex(left), c) if c.is_ascii_hexdigit() => self.go(state(Text::Hex(left - 1))),
            (Text::Escaped | Text::Hex(_), _) => Fed::Invalid,
        }
    }

    fn feed_word(&mut self, rest: &'static str, c: char) -> Fed {
        match rest.strip_prefix(c) {
            Some("") => self.ended(),
            Some(rest) => self.go(State::Word(rest)),
            None => Fed::Invalid,
        }
    }

    fn feed_number(&mut self, number: Number, c: char) -> Fed {
        use Number as N;
        let next = match (number, c) {
            (N::Minus, '0') => N::Zero,
            (N::Minus | N::Digits, '0'..='9') => N::Digits,
            (N::Zero | N::Digits, '.') => N::Point,
            (N::Point | N::Fraction, '0'..='9') => N::Fraction,
            (N::Zero | N::Digits | N::Fraction, 'e' | 'E') => N::Exponent,
            (N::Exponent, '+' | '-') => N::ExponentSign,
            (N::Exponent | N::ExponentSign | N::ExponentDigits, '0'..='9') => N::ExponentDigits,
            (N::Zero | N::Digits | N::Fraction | N::ExponentDigits, _) => {
                return self.number_ended(c);
            }
            _ => return Fed::Invalid,
        };
        self.go(State::Number(next))
    }

    /// A number does not say when it ends: the character after it does.
    fn number_ended(&mut self, c: char) -> Fed {
        if self.stack.is_empty() {
            return Fed::After;
        }
        self.state = State::CommaOrEnd;
        self.feed(c)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::Value;

    use super::*;

    /// How many characters the value that `text` starts with has; `None`: it is not whole.
    fn scan(text: &str) -> Result<Option<usize>, usize> {
        let mut scanner = JsonScanner::default();
        for (at, c) in text.char_indices() {
            match scanner.feed(c) {
                Fed::Inside => {}
                Fed::Last => return Ok(Some(at + c.len_utf8())),
                Fed::After => return Ok(Some(at)),
                Fed::Invalid => return Err(at),
            }
        }
        Ok(None)
    }

    #[test]
    fn values_end_where_they_end() {
        let check = |text, expected| assert_eq!(scan(text), expected, "{text}");
        check("{}x", Ok(Some(2)));
        check(r#" {"a": [1, 2.5e-3, "]}\"", {}], "b": null} tail"#, Ok(Some(42)));
        check("12,", Ok(Some(2)));
        check("[0]", Ok(Some(3)));
        check("true", Ok(Some(4)));
        check(r#""\u00e9""#, Ok(Some(8)));
        check(r#"{"a": 1"#, Ok(None));
        check("01", Ok(Some(1)));
        check("{,}", Err(1));
        check("[1,]", Err(3));
        check(r#"{"a" 1}"#, Err(5));
        check(r#""\x""#, Err(2));
        check("\"\n\"", Err(1));
        check("nul1", Err(3));
        check("[1 2]", Err(3));
        check(&"[".repeat(200), Err(128));
    }

    fn json() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::from),
            any::<i64>().prop_map(Value::from),
            any::<f64>().prop_map(Value::from),
            any::<String>().prop_map(Value::from),
        ];
        leaf.prop_recursive(4, 32, 4, |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
                prop::collection::hash_map(any::<String>(), inner, 0..4)
                    .prop_map(|map| Value::Object(map.into_iter().collect())),
            ]
        })
    }

    proptest! {
        /// serde_json writes and reads independently of this scanner.
        #[test]
        fn agrees_with_serde_json(value in json(), pretty in any::<bool>()) {
            let text = if pretty { format!("{value:#}") } else { value.to_string() };
            prop_assert_eq!(scan(&format!("{text} ")), Ok(Some(text.len())));
        }

        #[test]
        fn never_calls_a_wrong_text_whole(text in r#"[\[\]{}":,0-9eE.+\-tfn\\a ]{0,12}"#) {
            if let Ok(Some(len)) = scan(&text) {
                prop_assert!(serde_json::from_str::<Value>(&text[..len]).is_ok(), "{}", text);
            } else {
                prop_assert!(serde_json::from_str::<Value>(&text).is_err()
                    || text.trim_end().ends_with(|c: char| c.is_ascii_digit()), "{}", text);
            }
        }
    }
}
