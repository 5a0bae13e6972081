//! Who may ask, for what, and how much.
//!
//! Reading order: [`keys`] (API keys and their limits), [`key_file`] (a file of keys), [`meter`]
//! (how much a key has used), [`caller`] (who asks), [`bearer`] (whose key it is), [`cors`] (pages
//! of other origins), [`form`] (errors as the path's API spells them), [`gate`] (what every request
//! goes through).

mod bearer;
mod caller;
mod cors;
mod form;
mod gate;
mod key_file;
mod keys;
mod meter;

pub(crate) use bearer::Bearer;
pub(crate) use caller::{Account, Caller};
pub use cors::CorsOrigins;
pub(crate) use form::ErrorForm;
pub(crate) use gate::pass;
pub use keys::{ApiKey, ApiKeys, KeyError, KeyLimits};
