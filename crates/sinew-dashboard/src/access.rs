//! Access: a random token, in the URL of the first request or in `Authorization: Bearer`; browsers then have
//! a cookie.
//!
//! Browsers send a cookie to every port of a host, so other servers of the machine see it. The cookie is
//! therefore another random text than the token. It opens nothing in an address or as a bearer, and works
//! only together with the port in its name. The name also keeps several dashboards of one machine apart. The
//! token keeps out other users of the machine and pages of other sites.

use axum::http::{HeaderMap, Uri, header};

/// Random bytes of a token.
const BYTES: usize = 24;

/// A token and the text of its cookie, in hexadecimal.
#[derive(Clone)]
pub(crate) struct Token {
    token: String,
    cookie: String,
}

impl std::fmt::Debug for Token {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Token(..)")
    }
}

impl Token {
    /// Made up.
    ///
    /// # Errors
    /// If the system gives no random bytes.
    pub(crate) fn random() -> Result<Self, getrandom::Error> {
        let text = || {
            let mut bytes = [0; BYTES];
            getrandom::fill(&mut bytes)?;
            Ok(bytes.iter().map(|b| format!("{b:02x}")).collect())
        };
        Ok(Self {
            token: text()?,
            cookie: text()?,
        })
    }

    /// Token for the link.
    pub(crate) fn as_str(&self) -> &str {
        &self.token
    }

    /// Whether the query has it, as `?token=...`.
    pub(crate) fn is_in_query(&self, uri: &Uri) -> bool {
        let pairs = uri.query().unwrap_or_default().split('&');
        let mut given = pairs.filter_map(|p| p.strip_prefix("token="));
        given.any(|t| same(&self.token, t))
    }

    /// Whether the headers have it.
    pub(crate) fn is_in_headers(&self, headers: &HeaderMap, port: u16) -> bool {
        let text = |name| headers.get(name).and_then(|v| v.to_str().ok());
        let bearer = text(header::AUTHORIZATION).and_then(|v| v.strip_prefix("Bearer "));
        let name = format!("sinew_view_{port}=");
        let cookies = text(header::COOKIE).unwrap_or_default().split(';');
        let mut cookies = cookies.filter_map(|c| c.trim().strip_prefix(name.as_str()));
        bearer.is_some_and(|t| same(&self.token, t)) || cookies.any(|t| same(&self.cookie, t))
    }

    /// The header that sets the cookie.
    pub(crate) fn cookie(&self, port: u16) -> String {
        format!(
            "sinew_view_{port}={}; HttpOnly; SameSite=Lax; Path=/",
            self.cookie
        )
    }
}

/// Compares in a time that does not depend on where the texts differ.
fn same(own: &str, given: &str) -> bool {
    let differ = own.bytes().zip(given.bytes());
    given.len() == own.len() && differ.fold(0, |sum, (a, b)| sum | (a ^ b)) == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_token_opens() {
        let token = Token::random().unwrap();
        let query = |text: &str| token.is_in_query(&text.parse().unwrap());
        assert!(query(&format!("/?a=1&token={}", token.as_str())));
        assert!(!query("/?token=") && !query("/") && !query("/?token=00"));
        let headers = |name: header::HeaderName, value: String| {
            let mut headers = HeaderMap::new();
            headers.insert(name, value.parse().unwrap());
            token.is_in_headers(&headers, 80)
        };
        let cookie = token.cookie(80);
        let pair = cookie.split(';').next().unwrap();
        assert!(headers(header::COOKIE, format!("x=1; {pair}")));
        // The cookie is not the token, and neither stands for the other.
        let secret = pair.split_once('=').unwrap().1;
        assert!(!query(&format!("/?token={secret}")));
        assert!(!headers(header::AUTHORIZATION, format!("Bearer {secret}")));
        let token_as_cookie = format!("sinew_view_80={}", token.as_str());
        assert!(!headers(header::COOKIE, token_as_cookie));
        assert!(!headers(header::COOKIE, pair.replace("_80", "_81")));
        assert!(headers(
            header::AUTHORIZATION,
            format!("Bearer {}", token.as_str())
        ));
        assert!(!headers(header::AUTHORIZATION, "Bearer x".into()));
    }
}
