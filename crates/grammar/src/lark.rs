//! Pieces of `llguidance`'s Lark.

/// A text as a literal.
pub(crate) fn literal(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}

/// One of the texts.
pub(crate) fn choice(choices: &[String]) -> String {
    let choices: Vec<String> = choices.iter().map(|choice| literal(choice)).collect();
    format!("start: CHOICE\nCHOICE: {}\n", choices.join("\n    | "))
}
