//! Captured steps.

use std::any::Any;

/// What [`Backend::capture`](crate::Backend::capture) captured, in the backend's own form.
pub struct Graph(Box<dyn Any + Send>);

impl Graph {
    /// Wraps a backend's own form.
    pub fn new(captured: impl Any + Send) -> Self {
        Self(Box::new(captured))
    }

    /// The backend's own form, if it is of type `T`.
    pub fn get<T: Any>(&self) -> Option<&T> {
        self.0.downcast_ref()
    }
}
