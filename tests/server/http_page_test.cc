#include "server/http_page.h"

#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <string>

#include "absl/strings/str_cat.h"

namespace attendant::server {
namespace {

using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::StartsWith;

class HttpPageTest : public testing::Test {
 protected:
  // One for all tests: civetweb takes two seconds to stop.
  static void SetUpTestSuite() {
    auto page = HttpPage::Serve("127.0.0.1:0", {"/page", "text/plain", [] { return "a text\n"; }});
    ASSERT_TRUE(page.ok()) << page.status();
    page_ = page->release();
  }
  static void TearDownTestSuite() { delete page_; }

  // Everything that comes back until the server closes.
  std::string Send(const std::string& request) const {
    const int client = socket(AF_INET, SOCK_STREAM, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<uint16_t>(page_->port()));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    EXPECT_EQ(connect(client, reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
    EXPECT_EQ(send(client, request.data(), request.size(), MSG_NOSIGNAL),
              static_cast<ssize_t>(request.size()));
    shutdown(client, SHUT_WR);
    std::string answer;
    char bytes[4096];
    for (ssize_t got = 0; (got = recv(client, bytes, sizeof bytes, 0)) > 0;) {
      answer.append(bytes, static_cast<size_t>(got));
    }
    close(client);
    return answer;
  }
  std::string Ask(const std::string& line) const {
    return Send(absl::StrCat(line, " HTTP/1.1\r\nHost: here\r\n\r\n"));
  }

  static inline HttpPage* page_ = nullptr;
};

TEST_F(HttpPageTest, ThePageIsServed) {
  for (const char* const line : {"GET /page", "GET /page/", "GET /page?x=1"}) {
    const std::string answer = Ask(line);
    EXPECT_THAT(answer, StartsWith("HTTP/1.1 200 OK\r\n")) << line;
    EXPECT_THAT(answer, HasSubstr("Content-Length: 7\r\n")) << line;
    EXPECT_THAT(answer, EndsWith("\r\n\r\na text\n")) << line;
  }
}

TEST_F(HttpPageTest, AHeadHasNoBody) {
  const std::string answer = Ask("HEAD /page");
  EXPECT_THAT(answer, StartsWith("HTTP/1.1 200 OK\r\n"));
  EXPECT_THAT(answer, EndsWith("\r\n\r\n"));
}

TEST_F(HttpPageTest, OtherPathsAreNotFound) {
  for (const char* const path : {"/", "/favicon.ico", "/pages", "/page/more", "/../etc/passwd"}) {
    EXPECT_THAT(Ask(absl::StrCat("GET ", path)), StartsWith("HTTP/1.1 404 Not Found\r\n")) << path;
  }
}

TEST_F(HttpPageTest, OtherMethodsAreNotAllowed) {
  for (const char* const method : {"POST", "PUT", "DELETE", "PATCH"}) {
    const std::string answer = Ask(absl::StrCat(method, " /page"));
    EXPECT_THAT(answer, StartsWith("HTTP/1.1 405 Method Not Allowed\r\n")) << method;
    EXPECT_THAT(answer, HasSubstr("Allow: GET, HEAD\r\n")) << method;
  }
}

TEST_F(HttpPageTest, ItOutlivesWhateverIsSent) {
  for (const std::string& request :
       {std::string("\r\n\r\n"), std::string("nonsense\r\n\r\n"), std::string("GET"),
        std::string("GET / HTTP/9.9\r\n\r\n"), std::string("BREW /page HTTP/1.1\r\n\r\n"),
        std::string("GET nowhere HTTP/1.1\r\n\r\n"), std::string("GET %zz HTTP/1.1\r\n\r\n"),
        std::string("GET http://other/x HTTP/1.1\r\nHost: a\r\n\r\n"),
        std::string("GET /page HTTP/1.1\r\nExpect: 100-continue\r\nContent-Length: 5\r\n\r\n"),
        std::string("GET /page HTTP/1.1\r\nContent-Length: x\r\n\r\n"),
        std::string("GET /page HTTP/1.1\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n"),
        std::string("POST /page HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"),
        std::string("\0\1\2\3", 4),
        absl::StrCat("GET /", std::string(20000, 'a'), " HTTP/1.1\r\n\r\n"),
        absl::StrCat("GET /page HTTP/1.1\r\nX: ", std::string(100000, 'a'), "\r\n\r\n")}) {
    Send(request);
    EXPECT_THAT(Ask("GET /page"), StartsWith("HTTP/1.1 200 OK\r\n")) << request.substr(0, 80);
  }
}

TEST_F(HttpPageTest, ATakenPortIsAnError) {
  const auto second = HttpPage::Serve(absl::StrCat("127.0.0.1:", page_->port()),
                                      {"/page", "text/plain", [] { return ""; }});
  EXPECT_TRUE(absl::IsUnavailable(second.status())) << second.status();
}

}  // namespace
}  // namespace attendant::server
