//! What `transformers` adds for its templates: two functions and one tag.

use std::borrow::Cow;
use std::sync::LazyLock;

use fancy_regex::Regex;
use jiff::Zoned;
use minijinja::{Error, ErrorKind, Value};

/// The cause of an error that a template raised on purpose.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(super) struct Refusal(pub(super) String);

/// `raise_exception(message)`: the template does not accept the messages.
pub(super) fn raise_exception(message: String) -> Result<Value, Error> {
    let error = Error::new(ErrorKind::InvalidOperation, message.clone());
    Err(error.with_source(Refusal(message)))
}

/// `strftime_now(format)`: the local time, as Python's `datetime.now().strftime` writes it.
pub(super) fn strftime_now(format: &str) -> Result<String, Error> {
    strftime(format, &Zoned::now())
}

fn strftime(format: &str, now: &Zoned) -> Result<String, Error> {
    jiff::fmt::strtime::format(format, now)
        .map_err(|error| Error::new(ErrorKind::InvalidOperation, error.to_string()))
}

/// Rewrites `{% generation %}` blocks, which mark the assistant's tokens for training, as plain
/// scopes; whitespace control stays.
pub(super) fn without_generation_tags(source: &str) -> String {
    static TAG: LazyLock<Regex> = LazyLock::new(|| {
        Regex::new(r"\{%([-+]?)\s*(end)?generation\s*([-+]?)%\}").expect("the pattern is constant")
    });
    let plain: Cow<'_, str> = TAG.replace_all(source, "{%$1 ${2}with $3%}");
    plain.into_owned()
}

#[cfg(test)]
mod tests {
    use jiff::civil::date;
    use jiff::tz::TimeZone;

    use super::*;

    #[test]
    fn dates_as_python_writes_them() {
        let now = date(2024, 7, 6).at(9, 5, 3, 0).to_zoned(TimeZone::UTC).unwrap();
        // python3: datetime(2024, 7, 6, 9, 5, 3).strftime(...)
        assert_eq!(strftime("%d %b %Y", &now).unwrap(), "06 Jul 2024");
        assert_eq!(strftime("%Y-%m-%d %H:%M:%S", &now).unwrap(), "2024-07-06 09:05:03");
        assert_eq!(
            strftime("%A, %B %-d, %I %p %j %y %%", &now).unwrap(),
            "Saturday, July 6, 09 AM 188 24 %"
        );
        assert!(strftime("%Q%", &now).is_err());
    }

    #[test]
    fn generation_tags_become_scopes() {
        assert_eq!(
            without_generation_tags("a{%- generation -%}b{% endgeneration +%}{% if generation %}"),
            "a{%- with -%}b{% endwith +%}{% if generation %}"
        );
    }
}
