//! Lists in pieces, as OpenAI's clients turn their pages.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::object::Purpose;
use crate::error::ApiError;

/// Most objects of one page.
const MAX_LIMIT: usize = 10_000;

/// What of a list is asked for.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct PageQuery {
    after: Option<String>,
    limit: Option<usize>,
    order: Option<Order>,
    pub(crate) purpose: Option<Purpose>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Order {
    Asc,
    Desc,
}

/// A piece of a list.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct Page<T> {
    object: &'static str,
    data: Vec<T>,
    first_id: Option<String>,
    last_id: Option<String>,
    has_more: bool,
}

impl<T> Page<T> {
    /// The page of `all`, the oldest first, that was asked for.
    ///
    /// # Errors
    /// Too many are asked for, or what comes after something that is not there.
    pub(crate) fn of(
        mut all: Vec<T>,
        query: &PageQuery,
        usual_limit: usize,
        id: impl Fn(&T) -> &str,
    ) -> Result<Self, ApiError> {
        let limit = query.limit.unwrap_or(usual_limit);
        if !(1..=MAX_LIMIT).contains(&limit) {
            let reason = format!("is {limit}; it must be from 1 to {MAX_LIMIT}");
            return Err(ApiError::invalid("limit", reason));
        }
        if query.order != Some(Order::Asc) {
            all.reverse();
        }
        if let Some(after) = &query.after {
            let Some(place) = all.iter().position(|object| id(object) == after) else {
                return Err(ApiError::invalid("after", format!("there is no {after:?}")));
            };
            all.drain(..=place);
        }
        let has_more = all.len() > limit;
        all.truncate(limit);
        let id = |object: &T| id(object).to_owned();
        let (first_id, last_id) = (all.first().map(&id), all.last().map(&id));
        Ok(Self { object: "list", data: all, first_id, last_id, has_more })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_follow_each_other() {
        let page = |query: &str| {
            let query: PageQuery = serde_json::from_str(query).unwrap();
            let all = vec!["a", "b", "c", "d"];
            Page::of(all, &query, 3, |id| id).map(|page| (page.data, page.has_more))
        };
        assert_eq!(page("{}").unwrap(), (vec!["d", "c", "b"], true));
        assert_eq!(page(r#"{"after": "b"}"#).unwrap(), (vec!["a"], false));
        let rising = r#"{"order": "asc", "limit": 2, "after": "b"}"#;
        assert_eq!(page(rising).unwrap(), (vec!["c", "d"], false));
        assert_eq!(page(r#"{"after": "a"}"#).unwrap(), (vec![], false));
        assert!(page(r#"{"after": "e"}"#).is_err());
        assert!(page(r#"{"limit": 0}"#).is_err());
    }
}
