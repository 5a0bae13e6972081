//! Messages for templates, made from the items and blocks of other APIs.

use serde_json::{Map, Value, json};

/// Builds a conversation turn by turn. What one side says without the other coming in between is
/// one message where templates want it so: an assistant's thoughts, text and calls.
#[derive(Debug, Default)]
pub(crate) struct Turns(Vec<Value>);

impl Turns {
    /// Instructions, before all turns.
    pub(crate) fn system(text: Option<&str>) -> Self {
        Self(text.map(|text| json!({"role": "system", "content": text})).into_iter().collect())
    }

    /// A text; `role` is one that templates know. Instructions right after others join them.
    pub(crate) fn text(&mut self, role: &str, text: &str) {
        let joins = match self.0.last() {
            Some(last) if role == "assistant" => {
                last["role"] == role && last["content"] == "" && last.get("tool_calls").is_none()
            }
            Some(last) => role == "system" && last["role"] == role,
            None => false,
        };
        let Some(last) = self.0.last_mut().filter(|_| joins) else {
            return self.0.push(json!({"role": role, "content": text}));
        };
        let before = last["content"].as_str().unwrap_or_default();
        let gap = if before.is_empty() { "" } else { "\n\n" };
        last["content"] = format!("{before}{gap}{text}").into();
    }

    /// What the assistant thought.
    pub(crate) fn reasoning(&mut self, text: &str) {
        let last = self.assistant();
        let before = last.get("reasoning_content").and_then(Value::as_str).unwrap_or_default();
        last["reasoning_content"] = format!("{before}{text}").into();
    }

    /// A tool that the assistant called.
    pub(crate) fn call(&mut self, id: &str, name: &str, arguments: Map<String, Value>) {
        let function = json!({"name": name, "arguments": arguments});
        let call = json!({"id": id, "type": "function", "function": function});
        let last = self.assistant();
        match last.get_mut("tool_calls").and_then(Value::as_array_mut) {
            Some(calls) => calls.push(call),
            None => last["tool_calls"] = json!([call]),
        }
    }

    /// What a tool answered.
    pub(crate) fn result(&mut self, call_id: &str, text: &str) {
        self.0.push(json!({"role": "tool", "content": text, "tool_call_id": call_id}));
    }

    /// All messages.
    pub(crate) fn into_messages(self) -> Vec<Value> {
        self.0
    }

    /// The assistant's message that is being said.
    fn assistant(&mut self) -> &mut Value {
        if self.0.last().is_none_or(|last| last["role"] != "assistant") {
            self.0.push(json!({"role": "assistant", "content": ""}));
        }
        self.0.last_mut().expect("one was just pushed")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_message_for_what_belongs_together() {
        let mut turns = Turns::system(Some("Be brief."));
        turns.text("system", "Rhyme.");
        turns.text("user", "Hi");
        turns.reasoning("Hm.");
        turns.text("assistant", "Wait.");
        turns.call("c", "f", Map::new());
        turns.call("d", "g", Map::new());
        turns.result("c", "1");
        turns.text("assistant", "One.");
        turns.text("assistant", "Two.");
        let call = |id: &str, name: &str| {
            let function = json!({"name": name, "arguments": {}});
            json!({"id": id, "type": "function", "function": function})
        };
        let expected = json!([
            {"role": "system", "content": "Be brief.\n\nRhyme."},
            {"role": "user", "content": "Hi"},
            {
                "role": "assistant", "content": "Wait.", "reasoning_content": "Hm.",
                "tool_calls": [call("c", "f"), call("d", "g")],
            },
            {"role": "tool", "content": "1", "tool_call_id": "c"},
            {"role": "assistant", "content": "One."},
            {"role": "assistant", "content": "Two."},
        ]);
        assert_eq!(Value::Array(turns.into_messages()), expected);
    }
}
