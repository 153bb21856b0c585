//! Parser for the first message of a TLS connection, to find the requested host. Pure.

/// Content type of handshake records. TLS 1.2 and 1.3 share this format (RFC 8446, section 4.1.2).
const HANDSHAKE_RECORD: u8 = 22;
/// Handshake type of the client hello.
const CLIENT_HELLO: u8 = 1;
/// Extension number of the server name.
const SERVER_NAME: u16 = 0;
/// Encrypted Client Hello (RFC 9849): the outer server name differs from the real one.
const ENCRYPTED_CLIENT_HELLO: u16 = 0xfe0d;
/// Encrypted SNI, a draft before Encrypted Client Hello.
const ENCRYPTED_SNI: u16 = 0xffce;
/// Maximum bytes of a client hello. Those of common clients stay below 3 KiB.
pub(crate) const MAX_HELLO_BYTES: usize = 16 << 10;

/// Result of parsing the first bytes of a connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Hello {
    /// More bytes are needed.
    Partial,
    /// Not TLS, or longer than `MAX_HELLO_BYTES`.
    NotTls,
    /// A client hello.
    Client {
        /// Server name, if present.
        name: Option<String>,
        /// True if the real server name is encrypted.
        encrypted: bool,
    },
}

/// Parses the first bytes of a connection. Ignores bytes after the client hello.
pub fn client_hello(bytes: &[u8]) -> Hello {
    let mut message = Vec::new();
    let mut rest = bytes;
    loop {
        let Some(head) = rest.get(..5) else {
            let fits = rest.first().is_none_or(|&b| b == HANDSHAKE_RECORD)
                && bytes.len() < MAX_HELLO_BYTES;
            return if fits { Hello::Partial } else { Hello::NotTls };
        };
        let len = usize::from(u16::from_be_bytes([head[3], head[4]]));
        if head[0] != HANDSHAKE_RECORD || head[1] != 3 || len == 0 {
            return Hello::NotTls;
        }
        let end = (5 + len).min(rest.len());
        message.extend_from_slice(&rest[5..end]);
        if let Some(&[kind, a, b, c]) = message.get(..4) {
            let wanted = u32::from_be_bytes([0, a, b, c]) as usize;
            if kind != CLIENT_HELLO || wanted > MAX_HELLO_BYTES {
                return Hello::NotTls;
            }
            if message.len() >= 4 + wanted {
                return extensions(&message[4..4 + wanted]).unwrap_or(Hello::NotTls);
            }
        }
        if rest.len() < 5 + len {
            return if bytes.len() < MAX_HELLO_BYTES {
                Hello::Partial
            } else {
                Hello::NotTls
            };
        }
        rest = &rest[5 + len..];
    }
}

/// Reader of integers and length-prefixed vectors. Methods return `None` at the end of the data.
struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    /// Next `n` bytes.
    fn take(&mut self, n: usize) -> Option<&'a [u8]> {
        let (front, rest) = self.0.split_at_checked(n)?;
        self.0 = rest;
        Some(front)
    }

    /// Next big-endian integer.
    fn u16(&mut self) -> Option<u16> {
        self.take(2).map(|b| u16::from_be_bytes([b[0], b[1]]))
    }

    /// Next vector with a length of one byte.
    fn vec8(&mut self) -> Option<&'a [u8]> {
        let len = self.take(1)?[0];
        self.take(len.into())
    }

    /// Next vector with a length of two bytes.
    fn vec16(&mut self) -> Option<&'a [u8]> {
        let len = self.u16()?;
        self.take(len.into())
    }
}

/// Parses the body of a client hello. Returns `None` if it is malformed.
fn extensions(body: &[u8]) -> Option<Hello> {
    let mut reader = Reader(body);
    // Version and random, then session id, cipher suites and compression methods.
    reader.take(34)?;
    reader.vec8()?;
    reader.vec16()?;
    reader.vec8()?;
    let (mut name, mut encrypted) = (None, false);
    if !reader.0.is_empty() {
        let mut list = Reader(reader.vec16()?);
        while !list.0.is_empty() {
            let (kind, content) = (list.u16()?, list.vec16()?);
            match kind {
                // A duplicate is malformed: servers could choose either.
                SERVER_NAME if name.is_some() => return None,
                SERVER_NAME => name = Some(server_name(content)?),
                ENCRYPTED_CLIENT_HELLO | ENCRYPTED_SNI => encrypted = true,
                _ => {}
            }
        }
    }
    Some(Hello::Client { name, encrypted })
}

/// Parses a server name list with exactly one host name (RFC 6066, section 3).
fn server_name(content: &[u8]) -> Option<String> {
    let mut reader = Reader(content);
    let mut list = Reader(reader.vec16()?);
    let kind = list.take(1)?[0];
    let name = list.vec16()?;
    (kind == 0 && list.0.is_empty() && reader.0.is_empty())
        .then(|| String::from_utf8(name.to_vec()).ok())
        .flatten()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::sync::Arc;
    use tokio_rustls::rustls::{
        ClientConfig, ClientConnection, RootCertStore, crypto::ring, pki_types::ServerName,
    };

    /// Client hello of rustls.
    fn real(name: &str) -> Vec<u8> {
        let config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(RootCertStore::empty())
            .with_no_client_auth();
        let name = ServerName::try_from(name.to_string()).unwrap();
        let mut client = ClientConnection::new(Arc::new(config), name).unwrap();
        let mut bytes = Vec::new();
        client.write_tls(&mut bytes).unwrap();
        bytes
    }

    fn named(name: &str) -> Hello {
        Hello::Client {
            name: Some(name.into()),
            encrypted: false,
        }
    }

    #[test]
    fn server_name_is_found_in_whole_split_and_partial_messages() {
        let bytes = real("api.example.com");
        assert_eq!(client_hello(&bytes), named("api.example.com"));
        for len in 0..bytes.len() {
            assert_eq!(client_hello(&bytes[..len]), Hello::Partial, "{len}");
        }
        let mut records = Vec::new();
        for piece in bytes[5..].chunks(40) {
            records.extend([22, 3, 1, 0, piece.len() as u8]);
            records.extend(piece);
        }
        assert_eq!(client_hello(&records), named("api.example.com"));
    }

    #[test]
    fn other_protocols_are_not_tls() {
        for bytes in [
            &b"SSH-2.0-OpenSSH_9.2\r\n"[..],
            b"GET / HTTP/1.1\r\n\r\n",
            b"EHLO example.com\r\n",
            &[22, 3, 1, 0, 0],
        ] {
            assert_eq!(client_hello(bytes), Hello::NotTls);
        }
        assert_eq!(client_hello(&[22; 20000]), Hello::NotTls);
    }

    #[test]
    fn encrypted_server_names_are_detected() {
        let mut bytes = real("a.example.com");
        // Appends an empty Encrypted Client Hello extension.
        bytes.extend([0xfe, 0x0d, 0, 0]);
        let body = bytes.len() - 5;
        bytes[3..5].copy_from_slice(&(body as u16).to_be_bytes());
        bytes[6..9].copy_from_slice(&((body - 4) as u32).to_be_bytes()[1..]);
        let session = 5 + 4 + 34;
        let suites = session + 1 + usize::from(bytes[session]);
        let compression =
            suites + 2 + usize::from(u16::from_be_bytes([bytes[suites], bytes[suites + 1]]));
        let list = compression + 1 + usize::from(bytes[compression]);
        let len = (bytes.len() - list - 2) as u16;
        bytes[list..list + 2].copy_from_slice(&len.to_be_bytes());
        let hello = Hello::Client {
            name: Some("a.example.com".into()),
            encrypted: true,
        };
        assert_eq!(client_hello(&bytes), hello);
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_do_not_panic(
            bytes in proptest::collection::vec(any::<u8>(), 0..200),
            cut in 0usize..400, flip in 0usize..400, to in any::<u8>(),
        ) {
            client_hello(&bytes);
            let mut changed = real("a.example.com");
            let at = flip % changed.len();
            changed[at] = to;
            changed.truncate(cut);
            client_hello(&changed);
        }
    }
}
