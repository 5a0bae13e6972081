//! What callers ask for.

use serde_json::Value;

use crate::GrammarError;

/// What an output must be.
#[derive(Clone, Debug, PartialEq)]
pub enum Constraint {
    /// Any JSON object.
    JsonObject,
    /// JSON that a schema accepts.
    JsonSchema(Value),
    /// All of the output matches a regular expression in the syntax of Rust's `regex`: no
    /// look-around, no back references.
    Regex(String),
    /// A context-free grammar in `llguidance`'s variant of Lark, or in llama.cpp's GBNF: whichever
    /// it is in.
    Grammar(String),
    /// A context-free grammar in GBNF.
    Gbnf(String),
    /// One of these texts.
    Choice(Vec<String>),
}

/// Most bytes of a constraint as a text.
const MAX_BYTES: usize = 512 << 10;
/// Most levels of a JSON schema.
const MAX_DEPTH: usize = 64;
/// Most texts to choose from.
const MAX_CHOICES: usize = 4096;
/// Most lines, and so rules, of a grammar: each may refer to the next.
const MAX_LINES: usize = 4096;
/// Most references of a JSON schema, likewise.
const MAX_REFERENCES: usize = 4096;
/// Most digits, zeros at the ends left out, of a `multipleOf`.
const MAX_DIGITS: usize = 4;

impl Constraint {
    /// A text that is equal for equal constraints of a kind alone.
    pub(crate) fn key(&self) -> String {
        match self {
            Self::JsonObject => "object".to_owned(),
            Self::JsonSchema(schema) => format!("schema {schema}"),
            Self::Regex(regex) => format!("regex {regex}"),
            Self::Grammar(grammar) => format!("grammar {grammar}"),
            Self::Gbnf(grammar) => format!("gbnf {grammar}"),
            Self::Choice(choices) => format!("choice {choices:?}"),
        }
    }

    /// Checks sizes, and what `llguidance` is not sparing with.
    ///
    /// # Errors
    /// What is over a limit.
    pub fn check(&self) -> Result<(), GrammarError> {
        let bytes = match self {
            Self::JsonObject => 0,
            Self::JsonSchema(schema) => {
                SchemaCheck::default().visit(schema, MAX_DEPTH)?;
                schema.to_string().len()
            }
            Self::Regex(text) => text.len(),
            Self::Grammar(text) | Self::Gbnf(text) => {
                at_most("lines", text.lines().count(), MAX_LINES)?;
                text.len()
            }
            Self::Choice(choices) => {
                if choices.is_empty() {
                    return Err(GrammarError::Refused("has nothing to choose from".to_owned()));
                }
                at_most("choices", choices.len(), MAX_CHOICES)?;
                choices.iter().map(String::len).sum()
            }
        };
        match bytes {
            0..=MAX_BYTES => Ok(()),
            _ => Err(GrammarError::TooLarge { bytes, max_bytes: MAX_BYTES }),
        }
    }
}

fn at_most(what: &str, num: usize, max: usize) -> Result<(), GrammarError> {
    match num <= max {
        true => Ok(()),
        false => Err(GrammarError::Refused(format!("has {num} {what}; at most {max} are taken"))),
    }
}

/// Goes over a whole schema.
#[derive(Default)]
struct SchemaCheck {
    num_references: usize,
}

impl SchemaCheck {
    /// Recurses no deeper than `left`.
    fn visit(&mut self, value: &Value, left: usize) -> Result<(), GrammarError> {
        let Some(left) = left.checked_sub(1) else {
            return Err(GrammarError::TooDeep { max_depth: MAX_DEPTH });
        };
        match value {
            Value::Array(items) => items.iter().try_for_each(|item| self.visit(item, left)),
            Value::Object(fields) => fields.iter().try_for_each(|(name, field)| {
                self.check_field(name, field)?;
                self.visit(field, left)
            }),
            _ => Ok(()),
        }
    }

    fn check_field(&mut self, name: &str, value: &Value) -> Result<(), GrammarError> {
        match (name, value) {
            ("$ref", Value::String(_)) => {
                self.num_references += 1;
                at_most("references ($ref)", self.num_references, MAX_REFERENCES)
            }
            ("multipleOf", Value::Number(number)) => {
                // Its automaton has a state for every remainder.
                let digits: String =
                    number.to_string().chars().filter(char::is_ascii_digit).collect();
                let significant = digits.trim_matches('0').len();
                at_most("significant digits in multipleOf", significant, MAX_DIGITS)
            }
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn sizes_have_limits() {
        let nested = |depth: usize| (1..depth).fold(json!(1), |inner, _| json!({ "a": inner }));
        let schema = |depth| Constraint::JsonSchema(nested(depth)).check();
        assert_eq!(schema(MAX_DEPTH), Ok(()));
        assert_eq!(schema(MAX_DEPTH + 1), Err(GrammarError::TooDeep { max_depth: MAX_DEPTH }));
        let regex = |bytes| Constraint::Regex("a".repeat(bytes)).check();
        assert_eq!(regex(MAX_BYTES), Ok(()));
        assert!(matches!(regex(MAX_BYTES + 1), Err(GrammarError::TooLarge { .. })));
        let multiple = |of: Value| Constraint::JsonSchema(json!({ "multipleOf": of })).check();
        assert!(
            [json!(0.01), json!(1000), json!(9999), json!(0.125)]
                .map(multiple)
                .iter()
                .all(Result::is_ok)
        );
        assert!(multiple(json!(12345)).unwrap_err().to_string().contains("multipleOf"));
        let lines = |num| Constraint::Grammar("\n".repeat(num)).check();
        assert!(lines(MAX_LINES).is_ok() && lines(MAX_LINES + 1).is_err());
        let choice = |num| Constraint::Choice(vec!["a".to_owned(); num]).check();
        assert_eq!(choice(MAX_CHOICES), Ok(()));
        assert!(choice(MAX_CHOICES + 1).is_err() && choice(0).is_err());
    }
}
