//! Refusals and failures, as clients get them.

use sinew_render::RenderError;
use sinew_types::EngineError;

/// Seconds until a gateway that stops may be there again.
const STOPPING_RETRY_S: u32 = 5;

/// Class of an error, in the words that OpenAI's and Anthropic's clients share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorKind {
    /// Statuses 400, 405, 409 and 413.
    InvalidRequest,
    /// 401.
    Authentication,
    /// 403.
    Permission,
    /// 404 and 410.
    NotFound,
    /// 429: this client sends too much.
    RateLimit,
    /// 503: the gateway has too much to do, or stops.
    Overloaded,
    /// 500 and 504.
    Server,
}

impl ErrorKind {
    /// `error.type` of OpenAI's error objects.
    pub fn openai(self) -> &'static str {
        match self {
            Self::InvalidRequest | Self::NotFound => "invalid_request_error",
            Self::Authentication => "authentication_error",
            Self::Permission => "permission_error",
            Self::RateLimit => "rate_limit_error",
            Self::Overloaded | Self::Server => "server_error",
        }
    }
}

/// A refusal or a failure, as it goes over the wire.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct ApiError {
    /// HTTP status.
    pub status: u16,
    pub kind: ErrorKind,
    /// A word that programs can match.
    pub code: &'static str,
    /// The request field that is meant.
    pub param: Option<String>,
    /// Message for a person: the fault, and what is allowed.
    pub message: String,
    /// Seconds after which the same request may succeed.
    pub retry_after_s: Option<u32>,
}

impl ApiError {
    fn new(status: u16, kind: ErrorKind, code: &'static str, message: impl Into<String>) -> Self {
        Self {
            status,
            kind,
            code,
            param: None,
            message: message.into(),
            retry_after_s: None,
        }
    }

    /// 400: `param` is wrong.
    pub fn invalid(param: impl Into<String>, message: impl Into<String>) -> Self {
        Self {
            param: Some(param.into()),
            ..Self::new(400, ErrorKind::InvalidRequest, "invalid_value", message)
        }
    }

    /// Status 400 for an unknown field.
    pub fn unknown_field(path: &str) -> Self {
        let message = format!("unknown field {path:?}: nothing would be done with it, remove it");
        Self {
            code: "unknown_field",
            ..Self::invalid(path, message)
        }
    }

    /// 400: a field that is known and cannot be honoured.
    pub fn unsupported(path: &str, why: &str) -> Self {
        Self {
            code: "unsupported_value",
            ..Self::invalid(path, format!("{path}: {why}"))
        }
    }

    /// 400 without a field.
    pub fn bad_request(code: &'static str, message: impl Into<String>) -> Self {
        Self::new(400, ErrorKind::InvalidRequest, code, message)
    }

    /// 401.
    pub fn unauthorized(message: impl Into<String>) -> Self {
        Self::new(401, ErrorKind::Authentication, "invalid_api_key", message)
    }

    /// 404.
    pub fn not_found(message: impl Into<String>) -> Self {
        Self::new(404, ErrorKind::NotFound, "not_found", message)
    }

    /// 405.
    pub fn method(allowed: &str) -> Self {
        let message = format!("method not allowed here, use {allowed}");
        Self {
            status: 405,
            ..Self::bad_request("method_not_allowed", message)
        }
    }

    /// 409: the state of the rollout does not allow it.
    pub fn conflict(code: &'static str, message: impl Into<String>) -> Self {
        Self::new(409, ErrorKind::InvalidRequest, code, message)
    }

    /// 410: the rollout is over.
    pub fn gone(message: impl Into<String>) -> Self {
        Self::new(410, ErrorKind::NotFound, "rollout_finished", message)
    }

    /// 413.
    pub fn too_large(limit: usize) -> Self {
        let message = format!("the request body is larger than {limit} bytes");
        Self::new(413, ErrorKind::InvalidRequest, "body_too_large", message)
    }

    /// 429: the caller sends too much.
    pub fn rate_limit(code: &'static str, message: impl Into<String>) -> Self {
        Self {
            retry_after_s: Some(1),
            ..Self::new(429, ErrorKind::RateLimit, code, message)
        }
    }

    /// 503: the server has too much to do, or a part of it is away.
    pub fn overloaded(code: &'static str, message: impl Into<String>) -> Self {
        Self {
            retry_after_s: Some(1),
            ..Self::new(503, ErrorKind::Overloaded, code, message)
        }
    }

    /// 503: the gateway stops.
    pub fn stopping(what: &str) -> Self {
        let message =
            format!("the gateway is stopping: {what}; the same request may be sent again");
        Self {
            retry_after_s: Some(STOPPING_RETRY_S),
            ..Self::overloaded("gateway_stopping", message)
        }
    }

    /// 410: the run that the gateway belonged to has ended; nothing will be trained any more.
    pub fn run_ended() -> Self {
        let message =
            "the run has ended, so that no rollout will be trained any more: end the agent";
        Self::new(410, ErrorKind::NotFound, "run_ended", message)
    }

    /// 504: a deadline passed.
    pub fn deadline(message: impl Into<String>) -> Self {
        Self::new(504, ErrorKind::Server, "deadline", message)
    }

    /// 500.
    pub fn server(code: &'static str, message: impl Into<String>) -> Self {
        Self::new(500, ErrorKind::Server, code, message)
    }
}

impl From<EngineError> for ApiError {
    fn from(error: EngineError) -> Self {
        let message = error.to_string();
        match error {
            EngineError::QueueFull { .. } => Self::rate_limit("engine_queue_full", message),
            EngineError::PromptTooLong { .. } => {
                Self::bad_request("context_length_exceeded", message)
            }
            EngineError::UnknownToken { .. } => Self::invalid("prompt", message),
            EngineError::InvalidSampling { ref name, .. } => {
                let param = match name.as_str() {
                    "stop_strings" | "stop_ids" => "stop",
                    other => other,
                };
                Self::invalid(param, message)
            }
            EngineError::UnknownAdapter { .. } => Self {
                code: "unknown_adapter",
                ..Self::not_found(message)
            },
            EngineError::Format(_) => Self::server("format_failed", message),
            EngineError::Stopped(_) => Self::overloaded("engine_stopped", message),
            EngineError::Weights(_) | EngineError::Failed(_) => {
                Self::server("engine_failed", message)
            }
        }
    }
}

impl From<RenderError> for ApiError {
    fn from(error: RenderError) -> Self {
        let why = error.to_string();
        match error {
            RenderError::Media { message, part, .. } => {
                Self::unsupported(&format!("messages[{message}].content[{part}]"), &why)
            }
            _ => Self {
                code: "render_failed",
                ..Self::invalid("messages", why)
            },
        }
    }
}
