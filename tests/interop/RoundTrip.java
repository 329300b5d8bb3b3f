import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.io.PrintWriter;
import java.nio.ByteBuffer;
import java.util.HexFormat;
import org.apache.kafka.common.message.ApiMessageType;
import org.apache.kafka.common.protocol.ApiMessage;
import org.apache.kafka.common.protocol.ByteBufferAccessor;
import org.apache.kafka.common.protocol.ObjectSerializationCache;

/**
 * Decodes messages with Kafka's generated classes and encodes them again.
 *
 * A line of input is "key version kind hex"; kind is request or response.  The line of output is
 * the hex of the encoded message, or the exception.
 */
public class RoundTrip {
    public static void main(String[] arguments) throws Exception {
        BufferedReader in = new BufferedReader(new InputStreamReader(System.in));
        PrintWriter out = new PrintWriter(System.out);
        for (String line = in.readLine(); line != null; line = in.readLine()) {
            String[] words = line.split(" ", -1);
            try {
                out.println(again(words));
            } catch (RuntimeException error) {
                out.println(error.toString().replace('\n', ' '));
            }
        }
        out.flush();
    }

    private static String again(String[] words) {
        ApiMessageType type = ApiMessageType.fromApiKey(Short.parseShort(words[0]));
        short version = Short.parseShort(words[1]);
        ApiMessage message = words[2].equals("request") ? type.newRequest() : type.newResponse();
        ByteBuffer given = ByteBuffer.wrap(HexFormat.of().parseHex(words[3]));
        message.read(new ByteBufferAccessor(given), version);
        if (given.hasRemaining()) {
            return given.remaining() + " bytes are left";
        }
        ObjectSerializationCache cache = new ObjectSerializationCache();
        ByteBuffer made = ByteBuffer.allocate(message.size(cache, version));
        message.write(new ByteBufferAccessor(made), cache, version);
        return HexFormat.of().formatHex(made.array());
    }
}
